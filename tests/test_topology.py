"""Whole machines as trees of files: kinds of cores, threads a core, sockets, nodes, masks and quotas at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_system import V2_MOUNT, Write, add_cpus

from hybridgen_gguf.machine.probe import read_hardware
from hybridgen_gguf.machine.probe_cgroup import cpu_quota
from hybridgen_gguf.machine.probe_cpu import read_cpu

LAPTOP = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7", *map(str, range(8, 16))]  # 4 with SMT, 8 without


def laptop(write: Write) -> None:
    """4 performance cores of two threads, 8 efficiency cores."""
    add_cpus(write, LAPTOP)
    write("sys/devices/cpu_core/cpus", "0-7")
    write("sys/devices/cpu_atom/cpus", "8-15")


def quota(write: Write, **groups: str) -> None:
    """cpu.max of nested groups, `outer` above `inner`."""
    write("proc/self/cgroup", "0::/outer/inner")
    write("proc/self/mountinfo", V2_MOUNT)
    for name, text in groups.items():
        write(f"sys/fs/cgroup/outer/{'inner/' if name == 'inner' else ''}cpu.max", text)


@pytest.mark.parametrize(
    ("mask", "groups", "threads", "words"),
    [
        (range(16), {}, 4, "4 performance cores"),
        (range(2, 16), {}, 3, "3 performance cores"),
        ((1, 3, 8, 9), {}, 2, "2 performance cores"),  # one thread of each of two cores
        (range(8, 16), {}, 8, "by the affinity mask"),  # no performance core is left
        ((0, 1), {}, 1, "1 physical core of 12"),
        (range(16), {"inner": "250000 100000"}, 2, "quota of 2.5 CPUs, rounded down"),
        (range(16), {"inner": "350000 100000", "outer": "150000 100000"}, 1, "quota of 1.5 CPUs"),
        (range(16), {"inner": "max 100000", "outer": "30000 100000"}, 1, "quota of 0.3 CPUs, at least 1"),
        (range(16), {"inner": "50000 10000", "outer": "max"}, 4, "4 performance cores"),  # 5 CPUs: not the tightest
        (range(8, 16), {"outer": "650000 100000"}, 6, "quota of 6.5 CPUs"),
    ],
)
def test_a_laptop_with_two_kinds_of_cores(
    write: Write, tmp_path: Path, mask: Sequence[int], groups: dict[str, str], threads: int, words: str
) -> None:
    laptop(write)
    if groups:
        quota(write, **groups)
    cpu = read_cpu(tmp_path, mask)
    assert (cpu.physical, cpu.performance_cores, cpu.efficiency_cores, cpu.smt) == (12, 4, 8, 2)
    assert cpu.usable_threads == threads
    assert words in cpu.threads_reason


def server(write: Write) -> None:
    """Two sockets of four cores with two threads; one node each, and one of memory alone."""
    add_cpus(write, [f"{core},{core + 8}" for core in range(8)] * 2)
    for cpu in range(16):
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(cpu % 8 // 4))
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):
        write(f"sys/devices/system/node/node{node}/cpulist", cpus)
        write(f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: {(node + 1) << 20} kB")


def test_a_server_with_two_sockets(write: Write, tmp_path: Path) -> None:
    server(write)
    cpu = read_cpu(tmp_path, range(16))
    assert (cpu.sockets, cpu.physical, cpu.smt, cpu.usable_threads) == (2, 8, 2, 8)
    assert [(node.number, len(node.cpus), node.memory_total >> 30) for node in cpu.numa] == [
        (0, 8, 1), (1, 8, 2), (2, 0, 3),
    ]  # fmt: skip
    near = read_cpu(tmp_path, cpu.numa[1].cpus)
    assert (near.usable_threads, near.threads_reason) == (4, "4 physical cores of 8, by the affinity mask")


def test_more_nodes_than_ten_come_in_order(write: Write, tmp_path: Path) -> None:
    for node in range(12):
        write(f"sys/devices/system/node/node{node}/cpulist", str(node))
    assert [node.number for node in read_cpu(tmp_path, range(12)).numa] == list(range(12))


def test_cpus_that_are_offline_do_not_count(write: Write, tmp_path: Path) -> None:
    add_cpus(write, ["0,4", "1,5", "2,6", "3,7"] * 2)
    write("sys/devices/system/cpu/online", "0-2,4")  # two cores lost a thread, one is gone
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.logical, cpu.physical, cpu.smt, cpu.usable_threads) == (4, 3, 2, 3)


def test_three_kinds_of_arm_cores(write: Write, tmp_path: Path) -> None:
    add_cpus(write, [str(cpu) for cpu in range(8)])
    for cpu, capacity in enumerate([320, 320, 320, 320, 720, 720, 720, 1024]):
        write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.performance_cores, cpu.efficiency_cores, cpu.usable_threads) == (4, 4, 4)
    assert read_cpu(tmp_path, range(4)).usable_threads == 4  # pinned to the small ones: they are what there is


def test_nested_groups_of_version_1(write: Write, tmp_path: Path) -> None:
    """A pod in a slice: the pod may use 2.5 CPUs, its slice 1.25 of them."""
    add_cpus(write, [str(cpu) for cpu in range(8)])
    write("proc/self/cgroup", "5:cpu,cpuacct:/slice/pod\n2:memory:/\n")
    write("proc/self/mountinfo", "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct")
    for group, us in (("slice/pod", 250000), ("slice", 125000), (".", -1)):
        write(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us", str(us))
        write(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us", "100000")
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.quota, cpu.usable_threads) == (1.25, 1)
    assert "8 physical cores allowed" in cpu.threads_reason


def test_the_tighter_of_both_versions_counts(write: Write, tmp_path: Path) -> None:
    """systemd's hybrid mode: the CPU controller in version 1, others in version 2."""
    write("proc/self/cgroup", "4:cpu:/a\n0::/b")
    mounts = ("31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
              "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")  # fmt: skip
    write("proc/self/mountinfo", "\n".join(mounts))
    write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000")
    write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    write("sys/fs/cgroup/unified/b/cpu.max", "450000 100000")
    found = cpu_quota(tmp_path)
    assert found is not None and found.cpus == 3.0


def test_no_card_is_visible_and_none_is_planned_for(write: Write, tmp_path: Path) -> None:
    laptop(write)
    write("proc/driver/nvidia/version", "NVRM version: 580.1")
    hardware = read_hardware(root=tmp_path, affinity=range(16), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert hardware.devices == ()
    assert hardware.cpu.usable_threads == 4
