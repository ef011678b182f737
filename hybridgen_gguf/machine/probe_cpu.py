"""Reads cores, caches and memory nodes from Linux's /sys and decides how many threads to use. Measures nothing.

Invariant: `usable_threads` is at least 1 and at most the physical cores that the affinity mask and the control group's
quota leave.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .hardware import Cache, Cpu, NumaNode
from .probe_cgroup import CpuQuota, cpu_quota, read_text

_CPUS = "sys/devices/system/cpu"
_MOST_CPUS = 8192
# Those that the engine has code for; the whole list is 150 words long.
_FEATURES = (
    "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512vl", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512vbmi", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve", "sve2", "bf16",
    "fphp",
)  # fmt: skip


@dataclass(frozen=True)
class Core:
    """A physical core: its logical CPUs, and whether it is one of the slow kind on a machine with two kinds."""

    cpus: tuple[int, ...]
    efficiency: bool = False


def parse_cpu_list(text: str | None) -> tuple[int, ...]:
    """CPU numbers of a list such as `0-3,8`; what makes no sense in it is left out."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if first.isdecimal() and last.isdecimal() and int(last) < _MOST_CPUS:
            cpus.update(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))


def read_cpu(root: Path, affinity: Iterable[int] | None = None) -> Cpu:
    """The CPU of a Linux machine. `root` holds proc and sys; `affinity` is this process's mask unless given."""
    mask = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    online = parse_cpu_list(read_text(root / _CPUS / "online")) or mask
    cores = _cores(root, online)
    quota = cpu_quota(root)
    threads, reason = choose_threads(cores, mask, quota)
    slow = sum(core.efficiency for core in cores)
    model, features = _describe(root)
    return Cpu(
        model=model,
        architecture=platform.machine(),
        logical=len(online),
        physical=len(cores),
        usable_threads=threads,
        threads_reason=reason,
        performance_cores=len(cores) - slow if slow else 0,
        efficiency_cores=slow,
        smt=max((len(core.cpus) for core in cores), default=1),
        sockets=_sockets(root, cores),
        numa=_numa(root),
        caches=_caches(root, cores),
        features=features,
        affinity=mask,
        quota=None if quota is None else quota.cpus,
        governor=read_text(root / _CPUS / f"cpu{online[0]}/cpufreq/scaling_governor") if online else None,
    )


def choose_threads(cores: list[Core], mask: tuple[int, ...], quota: CpuQuota | None) -> tuple[int, str]:
    """How many threads, and why.

    One for each physical core that the mask touches: two threads on a core share its units and its cache. Efficiency
    cores are left out where performance cores are to be had, as the engine does by default: each layer ends when its
    slowest thread does.
    """
    allowed = [core for core in cores if set(core.cpus) & set(mask)]
    fast = [core for core in allowed if not core.efficiency]
    chosen = fast or allowed
    threads = max(len(chosen), 1)
    reason = f"{threads} physical core{'s' if threads > 1 else ''}"
    if fast and len(fast) < len(allowed):
        reason = f"{threads} performance core{'s' if threads > 1 else ''}, not counting efficiency cores"
    if len(allowed) < len(cores):
        reason += f" of {len(cores)}, by the affinity mask"
    if quota is not None and math.floor(quota.cpus) < threads:
        reason = f"a control-group quota of {quota.cpus:g} CPUs, {'rounded down' if quota.cpus >= 1 else 'at least 1'}"
        reason += f" ({len(chosen)} physical cores allowed)"
        threads = max(math.floor(quota.cpus), 1)
    return threads, reason


def _cores(root: Path, online: tuple[int, ...]) -> list[Core]:
    slow = _efficiency_cpus(root, online)
    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in online:
        if cpu in seen:
            continue
        topology = root / _CPUS / f"cpu{cpu}/topology"
        text = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        siblings = tuple(c for c in parse_cpu_list(text) if c in online and c not in seen) or (cpu,)
        seen.update(siblings, (cpu,))
        cores.append(Core(siblings, cpu in slow))
    return cores


def _efficiency_cpus(root: Path, online: tuple[int, ...]) -> set[int]:
    """CPUs of the slow kind: Intel names them; on ARM, those of at most half the largest capacity."""
    atoms = parse_cpu_list(read_text(root / "sys/devices/cpu_atom/cpus"))
    if atoms:
        return set(atoms) if set(online) - set(atoms) else set()
    if read_text(root / _CPUS / "cpu0/cpu_capacity") is None:
        return set()
    capacities = {cpu: read_text(root / _CPUS / f"cpu{cpu}/cpu_capacity") or "" for cpu in online}
    known = {cpu: int(text) for cpu, text in capacities.items() if text.isdecimal()}
    most = max(known.values(), default=0)
    return {cpu for cpu, capacity in known.items() if 2 * capacity <= most}


def _sockets(root: Path, cores: list[Core]) -> int:
    packages = {read_text(root / _CPUS / f"cpu{core.cpus[0]}/topology/physical_package_id") for core in cores}
    return max(len(packages - {None}), 1)


def _caches(root: Path, cores: list[Core]) -> tuple[Cache, ...]:
    """Of one core of each kind; the number of instances follows from how many CPUs share one."""
    found: dict[tuple[int, str, int, int], int] = {}
    for efficiency in (False, True):
        alike = [core for core in cores if core.efficiency == efficiency]
        if not alike:
            continue
        cpus = sum(len(core.cpus) for core in alike)
        for index in sorted((root / _CPUS / f"cpu{alike[0].cpus[0]}/cache").glob("index[0-9]*")):
            level, kind, size = (read_text(index / name) or "" for name in ("level", "type", "size"))
            shared = max(len(parse_cpu_list(read_text(index / "shared_cpu_list"))), 1)
            if not level.isdecimal() or not size.rstrip("KM").isdecimal():
                continue
            factor = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
            key = (int(level), kind.lower(), int(size.rstrip("KM")) * factor, shared)
            found[key] = max(found.get(key, 0), math.ceil(cpus / shared))
    return tuple(
        Cache(level, kind, size, instances, shared) for (level, kind, size, shared), instances in sorted(found.items())
    )


def _numa(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        sizes = {}
        for line in (read_text(folder / "meminfo") or "").splitlines():
            words = line.replace(":", " ").split()  # Node 0 MemTotal: 123 kB
            if len(words) >= 4 and words[3].isdecimal():
                sizes[words[2]] = int(words[3]) << 10
        cpus = parse_cpu_list(read_text(folder / "cpulist"))
        number = int(folder.name.removeprefix("node"))
        nodes.append(NumaNode(number, cpus, sizes.get("MemTotal", 0), sizes.get("MemFree", 0)))
    return tuple(sorted(nodes, key=lambda node: node.number))


def _describe(root: Path) -> tuple[str, tuple[str, ...]]:
    """Model name and features, from the first CPU's paragraph alone: the kernel writes the others slowly."""
    fields: dict[str, str] = {}
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for _, line in zip(range(200), file, strict=False):
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                fields[name.strip().lower()] = value.strip()
    except OSError:
        pass
    words = set((fields.get("flags") or fields.get("features") or "").split())
    return fields.get("model name", platform.processor()), tuple(name for name in _FEATURES if name in words)
