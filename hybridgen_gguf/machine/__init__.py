"""What this machine has and what it measures.

hardware      cores, memory, devices, links: plain data
probe         reads them from the system, with probe_cpu, probe_gpu and probe_cgroup
rates         measured and nominal rates, as the cost model asks for them
measure       measures them with the engine's own kernels
profile       keeps what was measured
doctor        what in the set-up costs speed, from doctor_facts
"""

from .hardware import Device, Hardware, Link
from .rates import Rates

__all__ = ["Device", "Hardware", "Link", "Rates"]
