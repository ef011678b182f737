"""What in the set-up of a machine costs speed: Hardware and facts → findings with cost and the command that mends them.

Pure. A cost is what this machine's profile measured, or what a document or a measurement says that the finding names as
its source; nothing is guessed.
Invariant: a finding names something that can be mended, by a command that can be copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..units import format_size
from .doctor_facts import Facts
from .hardware import Device, Hardware

_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # PCIe, one lane one way, after encoding
_BIG = 4 << 30
_ENGINE_VARIABLES = ("HGGUF_ENGINE", "LLAMA_CPP_LIB_PATH")
_PROFILE = "this machine's profile"
_KERNEL = "docs.kernel.org/admin-guide"
#: frequency drivers whose "powersave" follows the load, unlike the kernel's own governor of that name
_FOLLOWS_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")


@dataclass(frozen=True)
class Finding:
    """`name` for programs; one sentence `what`; what it costs, and the `source` of that figure; how to mend it."""

    name: str
    what: str
    cost: str
    source: str
    mend: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(hardware: Hardware, facts: Facts) -> tuple[Finding, ...]:
    """All findings, the dearest kinds first."""
    return (
        *_engine(facts),
        *_gpu_without_backend(hardware, facts),
        *(finding for device in hardware.devices for finding in _pcie(hardware, device)),
        *_container(hardware),
        *_clock(hardware, facts),
        *_swap(hardware),
        *_memlock(hardware),
        *_huge_pages(hardware),
        *_numa(hardware, facts),
        *_wait_policy(facts),
        *(_profile(hardware) if facts.engine else ()),  # which measures, and so needs the engine
    )


def _engine(facts: Facts) -> Iterator[Finding]:
    if not facts.engine:
        variable = next((name for name in _ENGINE_VARIABLES if name in facts.problem), "")
        mend = f"unset {variable}  # or build one: scripts/setup" if variable else "scripts/setup"
        yield Finding("engine missing", facts.problem, "nothing runs", "the engine's loader", mend)
    elif not facts.patched:
        yield Finding(
            "engine unpatched", "the engine is a stock llama.cpp without this project's patches",
            "attention to 32,768 cells on the CPU takes 91 ms instead of 6.9 (2 Zen 4 cores, f16), and bytes are not "
            "counted before loading",
            "docs/log/attention.md", "scripts/setup",
        )  # fmt: skip


def _gpu_without_backend(hardware: Hardware, facts: Facts) -> Iterator[Finding]:
    rates = [rate for rate in hardware.cpu.kernels if (rate.operation, rate.type) == ("matmul", "Q4_K")]
    best = max((rate.gflops for rate in rates), default=0.0)
    speed = f": prompts are read at the CPU's {best:.0f} GFLOP/s" if best else ""
    cost, source = f"the card is not used at all{speed}", _PROFILE if best else "the engine's list of backends"
    if facts.nvidia_seen and not facts.driver_answers:
        why = next((note for note in facts.notes if "driver" in note), "it gives no reason")
        yield Finding(
            "driver mismatch", f"there is an NVIDIA card, but its driver does not answer ({why})",
            cost, source, "sudo modprobe nvidia || sudo reboot  # after a driver update",
        )  # fmt: skip
    elif facts.nvidia_seen and facts.engine and not facts.gpu_backends:
        yield Finding(
            "engine without GPU", "there is an NVIDIA card, but this engine was built without CUDA", cost, source,
            "scripts/setup --cuda on",
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
    yield Finding(
        f"pcie {device.name}",
        f"{device.name} is linked by {slot.width} of {slot.width_max} lanes, generation {slot.generation} "
        f"of {slot.generation_max}",
        f"{measured or now:.1f} GB/s of the {most:.1f} that card and slot can do: copies of weights and cache take "
        f"{most / max(measured or now, 0.01):.1f} times as long",
        _PROFILE if measured else "the PCI Express specification's rates for a lane",
        f"nvidia-smi -q -i {slot.address} | grep -A3 'Link Width'  # seat the card in a full slot, then check",
    )


def _container(hardware: Hardware) -> Iterator[Finding]:
    cpu, memory = hardware.cpu, hardware.memory
    if cpu.quota is not None and cpu.quota < len(cpu.affinity or range(cpu.physical)):
        cost = f"{cpu.usable_threads} threads instead of {cpu.physical}"
        rates = {rate.threads: rate.gbps for rate in memory.read}
        one, all_ = rates.get(1), rates.get(cpu.usable_threads)
        if one and all_ and cpu.usable_threads > 1:
            cost += f"; a thread more brought {(all_ - one) / (cpu.usable_threads - 1):.1f} GB/s up to here"
        yield Finding(
            "cpu quota", f"a control group allows {cpu.quota:g} of {cpu.physical} cores", cost,
            _PROFILE if one else "the control group's files",
            "docker update --cpus N CONTAINER  # or: systemctl set-property UNIT CPUQuota=",
        )  # fmt: skip
    if memory.limit is not None and memory.limit < memory.total:
        yield Finding(
            "memory limit", f"memory is limited to {format_size(memory.limit)} of {format_size(memory.total)} "
            f"({memory.available_reason})",
            "larger models do not fit, and pages of the model's file count against it",
            f"{_KERNEL}/cgroup-v2.html, memory.max",
            "docker update --memory N CONTAINER  # or: systemctl set-property UNIT MemoryMax=infinity; "
            "ulimit -v unlimited",
        )  # fmt: skip


def _clock(hardware: Hardware, facts: Facts) -> Iterator[Finding]:
    governor, clock = hardware.cpu.governor, facts.clock
    mend = "sudo cpupower frequency-set -g performance"
    if governor == "powersave" and clock.driver not in _FOLLOWS_LOAD:
        ghz = f"{clock.least / 1e9:.1f} of {clock.most / 1e9:.1f} GHz: " if clock.least and clock.most else ""
        yield Finding(
            "cpu governor", "the CPU frequency governor is 'powersave'",
            f"{ghz}the lowest frequency that the policy allows is asked for, whatever the load",
            f"{_KERNEL}/pm/cpufreq.html, powersave", mend,
        )  # fmt: skip
    elif governor in ("conservative", "ondemand"):
        yield Finding(
            "cpu governor", f"the CPU frequency governor is '{governor}'",
            "the clock rises only after the load was seen, so the first tokens after a pause are slow"
            + (", and by small steps" if governor == "conservative" else ""),
            f"{_KERNEL}/pm/cpufreq.html, {governor}", mend,
        )  # fmt: skip
    if clock.driver in _FOLLOWS_LOAD and clock.preference == "power":
        yield Finding(
            "cpu energy preference", "the CPU was told to save power rather than to be fast",
            "it chooses lower frequencies than the load asks for",
            f"{_KERNEL}/pm/intel_pstate.html, energy_performance_preference",
            "echo balance_performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference",
        )  # fmt: skip


def _swap(hardware: Hardware) -> Iterator[Finding]:
    memory, disk = hardware.memory, hardware.disk
    if memory.swap_total and (memory.swappiness or 0) > 10 and memory.memlock is not None and memory.memlock < _BIG:
        known = disk is not None and disk.read_gbps is not None
        speed = f" at the disk's {disk.read_gbps:.1f} GB/s" if disk is not None and disk.read_gbps else ""
        yield Finding(
            "swap", f"the model may be swapped out (swappiness {memory.swappiness}), and locking it is not allowed",
            f"layers that were swapped out are read back{speed} while a token waits",
            _PROFILE if known else f"{_KERNEL}/sysctl/vm.html, swappiness; llama.cpp pull request 453",
            "sudo sysctl vm.swappiness=1",
        )  # fmt: skip


def _memlock(hardware: Hardware) -> Iterator[Finding]:
    limit = hardware.memory.memlock
    if limit is not None and limit < _BIG:
        yield Finding(
            "memlock", f"at most {format_size(limit)} may be locked in memory",
            "--mlock fails for larger models, so that weights can be dropped and read again from disk",
            "man 2 getrlimit, RLIMIT_MEMLOCK",
            "ulimit -l unlimited  # for good: '* - memlock unlimited' in /etc/security/limits.conf",
        )  # fmt: skip


def _huge_pages(hardware: Hardware) -> Iterator[Finding]:
    memory = hardware.memory
    if memory.huge_pages_total or memory.transparent_huge_pages not in ("never", "madvise"):
        return
    cost = "2 % of a token, 8 % of the largest matrix (SmolLM2, Zen 4): addresses are translated 4 KiB at a time"
    how = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 hgguf run --no-mmap ...  # weights in 2 MiB pages"
    if memory.transparent_huge_pages == "never":
        how = f"echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; {how}"
        what = "there are no 2 MiB pages: transparent ones are off, and none are reserved"
    else:
        what = "2 MiB pages are given to programs that ask for them alone, and the engine does not ask"
    yield Finding("huge pages", what, cost, f"docs/log/tune.md; {_KERNEL}/mm/transhuge.html", how)


def _numa(hardware: Hardware, facts: Facts) -> Iterator[Finding]:
    nodes = [node for node in hardware.cpu.numa if node.cpus]
    if len(nodes) < 2:
        return
    far = facts.numa_distance / 10
    latency = f"{far:.1f} times the latency of near memory" if far > 1 else "a longer way to memory"
    yield Finding(
        "numa", f"there are {len(nodes)} memory nodes, and nothing keeps threads near their weights",
        f"{latency}; on two Xeon 5218, 4 tokens/s instead of 8 on one node alone",
        "the firmware's distances (/sys/devices/system/node); mozilla-ai/llamafile issue 765",
        "hgguf run --numa distribute ...  # or, for a model that fits one node: numactl -N 0 -m 0 hgguf run ...",
    )  # fmt: skip
    for device in hardware.devices:
        if device.numa_node is not None:
            yield Finding(
                f"numa {device.name}", f"{device.name} hangs on node {device.numa_node} of {len(nodes)}",
                f"copies from the other nodes' memory have {latency}",
                "the firmware's distances (/sys/devices/system/node)", f"numactl -N {device.numa_node} hgguf run ...",
            )  # fmt: skip


def _wait_policy(facts: Facts) -> Iterator[Finding]:
    if facts.wait_policy.lower() == "passive":
        yield Finding(
            "wait policy", "OMP_WAIT_POLICY is 'passive': threads sleep at every step of a layer",
            "threads must be woken some hundred times a token, since they spin 0 times before they sleep instead of "
            "300,000; it helps only while others are busy",
            "gcc.gnu.org/onlinedocs/libgomp, GOMP_SPINCOUNT", "unset OMP_WAIT_POLICY",
        )  # fmt: skip


def _profile(hardware: Hardware) -> Iterator[Finding]:
    if not hardware.cpu.kernels:
        yield Finding(
            "no profile", "this machine was not measured, so plans are made by assumed rates",
            "which layers go to a GPU is decided by nominal rates, and the KV cache is not parted",
            "hybridgen_gguf/rates.py, nominal rates", "hgguf profile",
        )  # fmt: skip
