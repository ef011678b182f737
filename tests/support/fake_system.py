"""Trees of files such as Linux shows in /proc and /sys, below a temporary folder (the fixture `write`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GIB = 1 << 30
Write = Callable[[str, str], None]
V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def add_cpus(write: Write, siblings: Sequence[str], old: bool = False) -> None:
    """One entry a logical CPU: the list of CPUs on its core."""
    write("sys/devices/system/cpu/online", f"0-{len(siblings) - 1}")
    for cpu, cpus in enumerate(siblings):
        name = "thread_siblings_list" if old else "core_cpus_list"
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", cpus)
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "0")
