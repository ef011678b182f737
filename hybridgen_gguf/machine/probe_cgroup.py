"""Reads the control groups this process is in: CPU quota and memory limit, versions 1 and 2. Knows nothing of cores.

Invariant: a limit counts if it is set on the process's own group or on any group above it that can be seen; whatever
can't be read or makes no sense is no limit, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number just below 2**63


@dataclass(frozen=True)
class CpuQuota:
    """`cpus` may be a fraction; `source` is the file that says so."""

    cpus: float
    source: str


@dataclass(frozen=True)
class MemoryLimit:
    """`limit` bytes, of which `free` are left: file pages in the cache count as free, since they can be dropped."""

    limit: int
    free: int
    source: str


@dataclass(frozen=True)
class _Group:
    """A directory of the hierarchy, `version` 1 or 2."""

    folder: Path
    version: int


def read_text(path: Path) -> str | None:
    """A small file's text, stripped, or None if it cannot be read."""
    try:
        return path.read_bytes()[:65536].decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return None


def cpu_quota(root: Path) -> CpuQuota | None:
    """The least quota of all groups, or None. `root`: the folder that holds proc and sys, `/` outside of tests."""
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota_of(group)) is not None]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def memory_limits(root: Path) -> list[MemoryLimit]:
    """The limits of all groups, innermost first."""
    return [limit for group in _groups(root, "memory") if (limit := _limit_of(group)) is not None]


def _quota_of(group: _Group) -> CpuQuota | None:
    if group.version == 2:
        source = group.folder / "cpu.max"
        words = (read_text(source) or "").split()
        quota, period = _number(words[0] if words else ""), _number(words[1] if len(words) > 1 else "100000")
    else:
        source = group.folder / "cpu.cfs_quota_us"
        quota, period = _number(read_text(source)), _number(read_text(group.folder / "cpu.cfs_period_us"))
    if not quota or not period:
        return None
    return CpuQuota(quota / period, str(source))


def _limit_of(group: _Group) -> MemoryLimit | None:
    names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    usage = "memory.current" if group.version == 2 else "memory.usage_in_bytes"
    limits = [(value, name) for name in names if (value := _number(read_text(group.folder / name))) is not None]
    limits = [(value, name) for value, name in limits if value < _NO_LIMIT]
    if not limits:
        return None
    limit, name = min(limits)
    used = (_number(read_text(group.folder / usage)) or 0) - _file_pages(group)
    return MemoryLimit(limit, max(limit - max(used, 0), 0), str(group.folder / name))


def _file_pages(group: _Group) -> int:
    prefix = "" if group.version == 2 else "total_"  # version 1's plain names leave out the groups below
    counted = (prefix + "inactive_file", prefix + "active_file")
    lines = (line.split() for line in (read_text(group.folder / "memory.stat") or "").splitlines())
    return sum(_number(line[1]) or 0 for line in lines if len(line) == 2 and line[0] in counted)


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    for line in (read_text(root / "proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version = 2
        elif controller in controllers.split(","):
            version = 1
        else:
            continue
        for folder in _chain(*_mount(root, controller, version), path):
            yield _Group(folder, version)


def _mount(root: Path, controller: str, version: int) -> tuple[Path, str]:
    """Where the hierarchy is mounted, and which of its groups lies there."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        kind = right.split()
        place = left.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if (version == 2 and kind[0] == "cgroup2") or (
            version == 1 and kind[0] == "cgroup" and controller in kind[2].split(",")
        ):
            return root / place[4].lstrip("/"), place[3]
    folder = root / "sys/fs/cgroup"
    return (folder if version == 2 else folder / controller), "/"


def _chain(mount: Path, mounted_group: str, path: str) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount point; in a container often the mount point alone."""
    try:
        inside = PurePosixPath(path).relative_to(mounted_group)
    except ValueError:
        inside = PurePosixPath()  # the path is told as the host sees it, and only a part of the tree is mounted here
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents) if inside.parts else (inside,):
        yield mount / part


def _number(text: str | None) -> int | None:
    """A whole number of 0 or more; None for `max`, -1 and anything that is not a number."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 20 else None
