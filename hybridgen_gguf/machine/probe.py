"""Reads what this machine has into a `Hardware`: cores, memory, GPUs, disk. Measures nothing, loads no engine.

Invariant: it always gives an answer; what cannot be read keeps its default, and `Hardware.notes` says so. Takes a few
milliseconds on a machine without a GPU.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..units import format_size
from .hardware import Cpu, Disk, Hardware, Memory
from .probe_cgroup import memory_limits, read_text
from .probe_cpu import read_cpu
from .probe_gpu import read_gpus

_CAP_IPC_LOCK = 14  # linux/capability.h
_ROOT = Path("/")
# Beyond the plan, under `ulimit -v`: a run of SmolLM2 maps 70 to 80 MiB more than when it was planned.
_OWN_BYTES, _STACK_BYTES = 80 << 20, 8 << 20


def read_hardware(
    folder: Path | None = None,
    *,
    root: Path = _ROOT,
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Hardware:
    """The machine as this process sees it.

    `folder`: where the model lies, for `disk`. The others are for tests: `root` holds proc, sys and dev; `affinity`
    stands in for this process's mask, `environ` for its environment.
    """
    devices, notes = read_gpus(root, os.environ if environ is None else environ)
    if sys.platform.startswith("linux"):
        cpu, memory = read_cpu(root, affinity), read_memory(root)
    else:
        cpu, memory = _portable_cpu(), _portable_memory()
    return Hardware(cpu, memory, devices, disk=None if folder is None else read_disk(folder, root), notes=notes)


def read_memory(root: Path = _ROOT) -> Memory:
    """Main memory of a Linux machine, less what control groups and the process's own limits (ulimit) forbid."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    free = info.get("MemAvailable", info.get("MemFree", 0) + info.get("Cached", 0))
    bounds = [(free, "free memory of the machine", Memory.reserve)]
    limits = [(limit.limit, limit.free, f"the control group's limit of {format_size(limit.limit)} ({limit.source})")
              for limit in memory_limits(root) if limit.limit < total or not total]  # fmt: skip
    limits += _process_limits(root)
    # Under a limit nobody else takes anything; threads need stacks.
    own = _OWN_BYTES + _STACK_BYTES * len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (0,))
    bounds += [(left, reason, own) for _, left, reason in limits]
    available, reason, reserve = min(bounds, key=lambda bound: bound[0] - bound[2])
    swappiness = read_text(root / "proc/sys/vm/swappiness") or ""
    return Memory(
        total=total,
        available=available,
        available_reason=reason,
        reserve=reserve,
        limit=min((limit for limit, _, _ in limits), default=None),
        swap_total=info.get("SwapTotal", 0),
        swap_free=info.get("SwapFree", 0),
        swappiness=int(swappiness) if swappiness.isdecimal() else None,
        memlock=None if _may_lock(root) else _rlimit("RLIMIT_MEMLOCK"),
        huge_page_size=info.get("Hugepagesize", 0),
        huge_pages_total=info.get("HugePages_Total", 0),
        huge_pages_free=info.get("HugePages_Free", 0),
        transparent_huge_pages=_chosen(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def read_disk(folder: Path, root: Path = _ROOT) -> Disk | None:
    """The disk that holds `folder`, or None if that can't be told."""
    try:
        status, path = folder.stat(), str(folder.resolve())
        free = _free_bytes(folder)
    except OSError:
        return None
    device = (
        root / f"sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}" if hasattr(os, "major") else root
    )
    # A partition has no queue of its own; its disk is the folder above.
    text = read_text(device / "queue/rotational") or read_text(device / "../queue/rotational")
    return Disk(path, free, {"0": False, "1": True}.get(text or ""))


def _free_bytes(folder: Path) -> int:
    if hasattr(os, "statvfs"):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
    import shutil

    return shutil.disk_usage(folder).free


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes, and for HugePages_* plain counts."""
    values: dict[str, int] = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            values[name] = int(words[0]) << (10 if len(words) > 1 else 0)
    return values


def _process_limits(root: Path) -> list[tuple[int, int, str]]:
    """(limit, left, reason) of the address space and the data segment; mapping a model counts against the first."""
    words = (read_text(root / "proc/self/statm") or "").split()
    pages = [int(word) if word.isdecimal() else 0 for word in words] + [0] * 7
    page = os.sysconf("SC_PAGE_SIZE")
    limits = []
    for name, flag, used in (("RLIMIT_AS", "-v", pages[0] * page), ("RLIMIT_DATA", "-d", pages[5] * page)):
        limit = _rlimit(name)
        if limit is not None:
            limits.append(
                (limit, max(limit - used, 0), f"this process's limit of {format_size(limit)} (ulimit {flag})")
            )
    return limits


def _rlimit(name: str) -> int | None:
    try:
        import resource
    except ImportError:
        return None
    if not hasattr(resource, name):
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY or soft < 0 or soft >= 1 << 60 else soft


def _may_lock(root: Path) -> bool:
    """Whether this process may pass the limit on locked memory (CAP_IPC_LOCK among its effective capabilities)."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _chosen(text: str | None) -> str | None:
    """The word in brackets of `always [madvise] never`."""
    for word in (text or "").split():
        if word.startswith("[") and word.endswith("]"):
            return word[1:-1]
    return None


def _portable_cpu() -> Cpu:
    """macOS and Windows: what psutil knows."""
    import psutil

    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    mask: tuple[int, ...] = ()
    try:
        mask = tuple(psutil.Process().cpu_affinity())
    except (AttributeError, OSError):  # macOS has none
        pass
    threads = max(min(physical, len(mask) or physical), 1)
    reason = f"{threads} physical core{'s' if threads > 1 else ''}"
    reason += f" of {physical}, by the affinity mask" if threads < physical else ""
    model = platform.processor() or platform.machine()
    return Cpu(
        model, platform.machine(), logical, physical, threads, reason, smt=max(logical // physical, 1), affinity=mask
    )


def _portable_memory() -> Memory:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    reason = "free memory of the machine"
    return Memory(memory.total, memory.available, reason, swap_total=swap.total, swap_free=swap.free)
