"""What in the set-up of a machine costs speed: Hardware and facts → findings with cost and the command that mends them.

`examine` is pure; `read_facts` asks the engine and the system for what Hardware does not hold. Costs are measured where
a profile holds them and estimates otherwise; the sentence says which.
Invariant: a finding names something that can be mended, by a command that can be copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hardware import Device, Hardware
from .units import format_size

if TYPE_CHECKING:
    from .engine.library import Library

_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # PCIe, one lane one way, after encoding
_BIG = 4 << 30


@dataclass(frozen=True)
class Finding:
    """`name` for programs; one sentence `what`; what it costs (`measured` or an estimate); how to mend it."""

    name: str
    what: str
    cost: str
    measured: bool
    mend: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What Hardware does not hold. `gpu_backends`: of the engine; `patched`: it is ours; `problem`: why there is none.

    `nvidia_seen`: the kernel knows an NVIDIA card; `driver_answers`: its driver does; `wait_policy`: OMP_WAIT_POLICY.
    """

    engine: bool = True
    patched: bool = True
    gpu_backends: tuple[str, ...] = ()
    problem: str = ""
    nvidia_seen: bool = False
    driver_answers: bool = True
    notes: tuple[str, ...] = ()
    wait_policy: str = ""


def read_facts(library: Library | None, problem: str = "", root: Path = Path("/")) -> Facts:
    """Asks the engine and the system."""
    import os

    from .probe import read_hardware

    system = read_hardware(root=root)
    backends = (
        () if library is None else tuple(name for name in library.backends() if name not in ("CPU", "RPC", "BLAS"))
    )
    return Facts(
        engine=library is not None,
        patched=library is not None and library.patched,
        gpu_backends=backends,
        problem=problem,
        nvidia_seen=(root / "dev/nvidiactl").exists() or bool(system.devices) or _pci_nvidia(root),
        driver_answers=not any("driver does not answer" in note for note in system.notes),
        notes=system.notes,
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
    )


def _pci_nvidia(root: Path) -> bool:
    """A display controller of NVIDIA on the bus, with or without its driver."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def examine(hardware: Hardware, facts: Facts) -> tuple[Finding, ...]:
    """All findings, the dearest kinds first."""
    return (
        *_engine(facts),
        *_gpu_without_backend(facts),
        *(finding for device in hardware.devices for finding in _pcie(hardware, device)),
        *_container(hardware),
        *_governor(hardware),
        *_swap(hardware),
        *_memlock(hardware),
        *_huge_pages(hardware),
        *_numa(hardware),
        *_wait_policy(facts),
        *_profile(hardware),
    )


def _engine(facts: Facts) -> Iterator[Finding]:
    if not facts.engine:
        yield Finding(
            "engine missing", f"the engine cannot be used: {facts.problem}", "nothing runs", False, "scripts/setup"
        )
    elif not facts.patched:
        yield Finding(
            "engine unpatched", "the engine is a stock llama.cpp without this project's patches",
            "attention over long contexts on the CPU is 4 to 20 times slower (measured on two machines), and bytes "
            "are estimated",
            False, "scripts/setup",
        )  # fmt: skip


def _gpu_without_backend(facts: Facts) -> Iterator[Finding]:
    if facts.nvidia_seen and not facts.driver_answers:
        why = next((note for note in facts.notes if "driver" in note), "it gives no reason")
        yield Finding(
            "driver mismatch", f"there is an NVIDIA card, but its driver does not answer ({why})",
            "the card is not used at all", False, "sudo modprobe nvidia || sudo reboot  # after a driver update",
        )  # fmt: skip
    elif facts.nvidia_seen and facts.engine and not facts.gpu_backends:
        yield Finding(
            "engine without GPU", "there is an NVIDIA card, but this engine was built without CUDA",
            "the card is not used at all: reading prompts is 10 to 100 times slower (estimate)",
            False, "scripts/setup --cuda on",
        )  # fmt: skip


def _pcie(hardware: Hardware, device: Device) -> Iterator[Finding]:
    slot = device.pcie
    if slot is None or not (slot.width and slot.width_max and slot.generation_max):
        return
    link = next((link for link in hardware.links if link.device == device.name), None)
    measured = link.to_device_pinned_gbps if link else None
    now = _LANE_GBPS.get(slot.generation or slot.generation_max, 1.0) * slot.width
    most = _LANE_GBPS.get(slot.generation_max, 1.0) * slot.width_max
    # An idle card lowers its generation, so only the width tells, or a measured copy.
    slow = measured is not None and measured < 0.6 * most
    if slot.width >= slot.width_max and not slow:
        return
    speed = f"{measured:.1f} GB/s (measured)" if measured else f"about {now:.1f} GB/s"
    yield Finding(
        f"pcie {device.name}",
        f"{device.name} is linked by {slot.width} of {slot.width_max} lanes, generation {slot.generation} "
        f"of {slot.generation_max}",
        f"{speed} of the {most:.1f} GB/s that card and slot can do: copies of weights and cache take "
        f"{most / max(measured or now, 0.01):.1f} times as long",
        measured is not None,
        f"seat the card in a full slot; then check: nvidia-smi -q -i {slot.address} | grep -A3 'Link Width'",
    )


def _container(hardware: Hardware) -> Iterator[Finding]:
    cpu, memory = hardware.cpu, hardware.memory
    if cpu.quota is not None and cpu.quota < len(cpu.affinity or range(cpu.physical)):
        cost = f"{cpu.usable_threads} threads instead of {cpu.physical}"
        rates = {rate.threads: rate.gbps for rate in memory.read}
        yield Finding(
            "cpu quota", f"a control group allows {cpu.quota:g} of {cpu.physical} cores", cost,
            bool(rates), "docker run --cpus ... (or: systemctl set-property UNIT CPUQuota=)",
        )  # fmt: skip
    if memory.limit is not None and memory.limit < memory.total:
        yield Finding(
            "memory limit", f"memory is limited to {format_size(memory.limit)} of {format_size(memory.total)} "
            f"({memory.available_reason})",
            "larger models do not fit, and pages of the model's file count against it", False,
            "docker run --memory ... (or: systemctl set-property UNIT MemoryMax=infinity; ulimit -v unlimited)",
        )  # fmt: skip


def _governor(hardware: Hardware) -> Iterator[Finding]:
    if hardware.cpu.governor in ("powersave", "conservative", "ondemand") and sys.platform.startswith("linux"):
        yield Finding(
            "cpu governor", f"the CPU frequency governor is '{hardware.cpu.governor}'",
            "the first tokens after a pause run at a low clock; up to 20 % while writing (estimate; unless active "
            "intel_pstate or amd-pstate decide anyway)",
            False, "sudo cpupower frequency-set -g performance",
        )  # fmt: skip


def _swap(hardware: Hardware) -> Iterator[Finding]:
    memory = hardware.memory
    if memory.swap_total and (memory.swappiness or 0) > 10 and memory.memlock is not None and memory.memlock < _BIG:
        yield Finding(
            "swap", f"the model may be swapped out (swappiness {memory.swappiness}), and locking it is not allowed",
            "a layer that was swapped out is read back at the disk's speed: "
            + (f"{hardware.disk.read_gbps:.1f} GB/s (measured)" if hardware.disk and hardware.disk.read_gbps
               else "0.1 to 3 GB/s (estimate)"),
            bool(hardware.disk and hardware.disk.read_gbps), "sudo sysctl vm.swappiness=1",
        )  # fmt: skip


def _memlock(hardware: Hardware) -> Iterator[Finding]:
    limit = hardware.memory.memlock
    if limit is not None and limit < _BIG:
        yield Finding(
            "memlock", f"at most {format_size(limit)} may be locked in memory",
            "--mlock fails for larger models, so that weights can be dropped and read again from disk", False,
            "ulimit -l unlimited  # for good: '* - memlock unlimited' in /etc/security/limits.conf",
        )  # fmt: skip


def _huge_pages(hardware: Hardware) -> Iterator[Finding]:
    memory = hardware.memory
    if memory.transparent_huge_pages == "never" and not memory.huge_pages_total:
        yield Finding(
            "huge pages", "there are no 2 MiB pages: transparent ones are off, and none are reserved",
            "3 to 10 % of the speed of reading weights and cache, by address translation (estimate)", False,
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip


def _numa(hardware: Hardware) -> Iterator[Finding]:
    nodes = [node for node in hardware.cpu.numa if node.cpus]
    if len(nodes) > 1:
        yield Finding(
            "numa", f"there are {len(nodes)} memory nodes, and nothing keeps threads near their weights",
            "reading from the other node runs at a half to two thirds of the speed (estimate)", False,
            "hgguf run --numa distribute ...  # or, for a model that fits one node: numactl -N 0 -m 0 hgguf run ...",
        )  # fmt: skip
    for device in hardware.devices:
        if device.numa_node is not None and len(nodes) > 1:
            yield Finding(
                f"numa {device.name}", f"{device.name} hangs on node {device.numa_node} of {len(nodes)}",
                "copies that cross nodes lose up to a third (estimate)", False,
                f"numactl -N {device.numa_node} hgguf run ...",
            )  # fmt: skip


def _wait_policy(facts: Facts) -> Iterator[Finding]:
    if facts.wait_policy.lower() == "passive":
        yield Finding(
            "wait policy", "OMP_WAIT_POLICY is 'passive': threads sleep at every step of a layer",
            "threads must be woken at each of some hundred steps of a token (not measured); it helps only while others "
            "are busy",
            False, "unset OMP_WAIT_POLICY",
        )  # fmt: skip


def _profile(hardware: Hardware) -> Iterator[Finding]:
    if not hardware.cpu.kernels:
        yield Finding(
            "no profile", "this machine was not measured, so plans are made by assumed rates",
            "placement on GPUs may be far from the best; on the CPU alone nothing", False, "hgguf profile",
        )  # fmt: skip
