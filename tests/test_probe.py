"""Cores, control groups and memory from trees of files such as Linux shows them."""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path

import pytest
from fake_system import GIB, V2_MOUNT, Write, add_cpus

from hybridgen_gguf.machine.hardware import Cache, from_json, to_json
from hybridgen_gguf.machine.probe import read_disk, read_hardware, read_memory
from hybridgen_gguf.machine.probe_cgroup import cpu_quota, memory_limits
from hybridgen_gguf.machine.probe_cpu import parse_cpu_list, read_cpu


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,5, 7-7\n") == (0, 1, 2, 5, 7)
    for nonsense in ("", None, "a-b", "3-", "-1", "0-999999999999", "\x00", "1--2"):
        assert parse_cpu_list(nonsense) == ()


@pytest.mark.parametrize("old", [False, True])
def test_two_threads_a_core_give_one_thread_a_core(write: Write, tmp_path: Path, old: bool) -> None:
    add_cpus(write, ["0,4", "1,5", "2,6", "3,7"] * 2, old)
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.logical, cpu.physical, cpu.smt, cpu.usable_threads) == (8, 4, 2, 4)
    assert cpu.threads_reason == "4 physical cores"


@pytest.mark.parametrize(
    ("mask", "threads", "reason"),
    [
        ([0], 1, "1 physical core of 4, by the affinity mask"),
        ([0, 4], 1, "1 physical core of 4, by the affinity mask"),
        ([0, 1], 2, "2 physical cores of 4, by the affinity mask"),
        ([0, 5, 6], 3, "3 physical cores of 4, by the affinity mask"),
        ([4, 5, 6, 7], 4, "4 physical cores"),
        ([99], 1, "1 physical core of 4, by the affinity mask"),
    ],
)
def test_affinity_counts_cores(write: Write, tmp_path: Path, mask: list[int], threads: int, reason: str) -> None:
    add_cpus(write, ["0,4", "1,5", "2,6", "3,7"] * 2)
    cpu = read_cpu(tmp_path, mask)
    assert (cpu.usable_threads, cpu.threads_reason) == (threads, reason)
    assert cpu.affinity == tuple(mask)


def test_efficiency_cores_of_intel_are_left_out(write: Write, tmp_path: Path) -> None:
    add_cpus(write, ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"])
    write("sys/devices/cpu_core/cpus", "0-3")
    write("sys/devices/cpu_atom/cpus", "4-7")
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.physical, cpu.performance_cores, cpu.efficiency_cores) == (6, 2, 4)
    assert (cpu.usable_threads, cpu.threads_reason) == (2, "2 performance cores, not counting efficiency cores")
    assert read_cpu(tmp_path, [4, 5, 6]).usable_threads == 3
    write("sys/devices/cpu_atom/cpus", "0-7")
    assert read_cpu(tmp_path, range(8)).efficiency_cores == 0


def test_slow_cores_of_arm_are_told_by_their_capacity(write: Write, tmp_path: Path) -> None:
    add_cpus(write, [str(cpu) for cpu in range(8)])
    for cpu, capacity in enumerate([400, 400, 400, 400, 900, 900, 900, 1024]):
        write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    cpu_ = read_cpu(tmp_path, range(8))
    assert (cpu_.performance_cores, cpu_.efficiency_cores, cpu_.usable_threads) == (4, 4, 4)


def test_machine_that_shows_nothing_has_a_core_for_each_cpu_in_the_mask(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path, [0, 1, 2])
    assert (cpu.logical, cpu.physical, cpu.usable_threads, cpu.quota) == (3, 3, 3, None)
    assert (cpu.caches, cpu.numa, cpu.governor) == ((), (), None)


def test_caches_nodes_model_and_features(write: Write, tmp_path: Path) -> None:
    add_cpus(write, ["0", "1", "2", "3"])
    for index, (level, kind, size, shared) in enumerate([(1, "Data", "32K", "0"), (3, "Unified", "32M", "0-3")]):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            write(f"{folder}/{name}", str(value))
    write("sys/devices/system/cpu/cpu0/cache/index9/size", "?")
    write("sys/devices/system/node/node1/cpulist", "")
    write("sys/devices/system/node/node0/cpulist", "0-3")
    write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  2048 kB\nNode 0 MemFree: 1024 kB")
    write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    write("proc/cpuinfo", "model name\t: A CPU\nflags\t: fpu avx2 avx512f\n\nmodel name\t: not this one")
    cpu = read_cpu(tmp_path, range(4))
    assert cpu.caches == (Cache(1, "data", 32 << 10, 4, 1), Cache(3, "unified", 32 << 20, 1, 4))
    assert [(n.number, n.cpus, n.memory_total, n.memory_free) for n in cpu.numa] == [
        (0, (0, 1, 2, 3), 2 << 20, 1 << 20),
        (1, (), 0, 0),
    ]
    assert (cpu.model, cpu.features, cpu.governor) == ("A CPU", ("avx2", "avx512f"), "powersave")


@pytest.mark.parametrize(
    ("text", "cpus", "threads"),
    [
        ("765000 100000", 7.65, 7),
        ("50000 100000", 0.5, 1),
        ("100000 100000", 1.0, 1),
        ("300000", 3.0, 3),
        ("max 100000", None, 8),
        ("max", None, 8),
        ("", None, 8),
        ("0 100000", None, 8),
        ("100000 0", None, 8),
        ("-1 100000", None, 8),
        ("junk 100000", None, 8),
        ("1" * 30 + " 100000", None, 8),
        ("9900000 100000", 99.0, 8),
    ],
)
def test_quota_of_version_2(write: Write, tmp_path: Path, text: str, cpus: float | None, threads: int) -> None:
    add_cpus(write, [str(cpu) for cpu in range(8)])
    write("proc/self/cgroup", "0::/a")
    write("sys/fs/cgroup/a/cpu.max", text)
    cpu = read_cpu(tmp_path, range(8))
    assert (cpu.quota, cpu.usable_threads) == (cpus, threads)
    assert ("quota" in cpu.threads_reason) == (threads < 8)


def test_reason_names_the_quota(write: Write, tmp_path: Path) -> None:
    add_cpus(write, [str(cpu) for cpu in range(16)])
    write("sys/fs/cgroup/cpu.max", "765000 100000")
    reason = "a control-group quota of 7.65 CPUs, rounded down (16 physical cores allowed)"
    assert read_cpu(tmp_path, range(16)).threads_reason == reason


@pytest.mark.parametrize("tight", ["a", "a/b", "a/b/c", "."])
def test_least_of_all_groups_above_counts(write: Write, tmp_path: Path, tight: str) -> None:
    write("proc/self/cgroup", "0::/a/b/c")
    write("proc/self/mountinfo", V2_MOUNT)
    for group in (".", "a", "a/b", "a/b/c"):
        write(f"sys/fs/cgroup/{group}/cpu.max", "200000 100000" if group == tight else "400000 100000")
        write(f"sys/fs/cgroup/{group}/memory.max", str(2 * GIB if group == tight else 4 * GIB))
    quota = cpu_quota(tmp_path)
    assert quota is not None
    assert quota.cpus == 2.0
    assert quota.source.endswith("cpu.max")
    assert min(limit.limit for limit in memory_limits(tmp_path)) == 2 * GIB


def test_groups_beside_ours_do_not_count(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/a")
    write("sys/fs/cgroup/b/cpu.max", "100000 100000")
    write("sys/fs/cgroup/a/inner/cpu.max", "100000 100000")
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/abc", "/"),  # the host's path, not visible in here
        ("/docker/abc", "/docker/abc"),  # the container's group is what is mounted
        ("/../../other", "/"),  # a namespace seen from outside
        ("/", "/docker/abc"),
        ("/docker/abcdef", "/docker/abc"),
    ],
)
def test_container_whose_own_path_is_not_visible(write: Write, tmp_path: Path, path: str, mounted: str) -> None:
    write("proc/self/cgroup", f"0::{path}")
    write("proc/self/mountinfo", V2_MOUNT.replace(" / ", f" {mounted} "))
    write("sys/fs/cgroup/cpu.max", "200000 100000")
    write("sys/fs/other/cpu.max", "100000 100000")
    quota = cpu_quota(tmp_path)
    assert quota is not None
    assert quota.cpus == 2.0


def test_quota_of_version_1(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "9:name=systemd:/x\n4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/")
    write(
        "proc/self/mountinfo",
        "31 30 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    )
    write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000")
    write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", str(GIB))
    write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", str(GIB // 2))
    write("sys/fs/cgroup/memory/docker/abc/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 4}\nbroken")
    write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "9223372036854771712")
    quota = cpu_quota(tmp_path)
    assert quota is not None
    assert quota.cpus == 1.5
    assert [(limit.limit, limit.free) for limit in memory_limits(tmp_path)] == [(GIB, GIB * 3 // 4)]
    write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    assert cpu_quota(tmp_path) is None


@pytest.fixture
def meminfo(write: Write) -> None:
    lines = ("MemTotal: 16777216 kB", "MemAvailable: 8388608 kB", "SwapTotal: 4096 kB", "SwapFree: 2048 kB",
             "HugePages_Total: 7", "HugePages_Free: 5", "Hugepagesize: 2048 kB", "Odd", "Other: x kB")  # fmt: skip
    write("proc/meminfo", "\n".join(lines))


def no_limit(kind: int) -> tuple[int, int]:
    return resource.RLIM_INFINITY, resource.RLIM_INFINITY


@pytest.mark.usefixtures("meminfo")
def test_memory_without_limits(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", no_limit)
    write("proc/sys/vm/swappiness", "60")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    memory = read_memory(tmp_path)
    assert (memory.total, memory.available, memory.limit, memory.memlock) == (16 * GIB, 8 * GIB, None, None)
    assert memory.available_reason == "free memory of the machine"
    assert (memory.swap_total, memory.swap_free, memory.swappiness) == (4 << 20, 2 << 20, 60)
    assert (memory.huge_page_size, memory.huge_pages_total, memory.huge_pages_free) == (2 << 20, 7, 5)
    assert memory.transparent_huge_pages == "madvise"


@pytest.mark.usefixtures("meminfo")
def test_memory_limit_of_a_group_less_what_is_used(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", no_limit)
    write("proc/self/cgroup", "0::/a/b")
    write("sys/fs/cgroup/a/memory.max", str(6 * GIB))
    write("sys/fs/cgroup/a/memory.current", str(5 * GIB))
    write("sys/fs/cgroup/a/memory.stat", f"anon {2 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}")
    write("sys/fs/cgroup/a/b/memory.max", "max")
    write("sys/fs/cgroup/a/b/memory.high", str(7 * GIB))
    write("sys/fs/cgroup/a/b/memory.current", str(GIB))
    memory = read_memory(tmp_path)
    assert (memory.available, memory.limit) == (4 * GIB, 6 * GIB)
    source = tmp_path / "sys/fs/cgroup/a/memory.max"
    assert memory.available_reason == f"the control group's limit of 6.00 GiB ({source})"
    assert memory.reserve < 256 << 20  # nobody else takes what the group may have
    write("sys/fs/cgroup/a/memory.current", str(9 * GIB))
    assert read_memory(tmp_path).available == 0


@pytest.mark.usefixtures("meminfo")
def test_limits_of_the_process_less_what_is_mapped(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: 4 * GIB, resource.RLIMIT_DATA: 3 * GIB, resource.RLIMIT_MEMLOCK: 65536}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    page = resource.getpagesize()
    write("proc/self/statm", f"{3 * GIB // page} 1 1 1 0 {GIB // page} 0")
    memory = read_memory(tmp_path)
    assert (memory.available, memory.limit, memory.memlock) == (GIB, 3 * GIB, 65536)
    assert memory.available_reason == "this process's limit of 4.00 GiB (ulimit -v)"


@pytest.mark.usefixtures("meminfo")
def test_group_limit_above_the_machine_is_none(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", no_limit)
    write("sys/fs/cgroup/memory.max", str(64 * GIB))
    assert read_memory(tmp_path).limit is None


def test_memory_of_a_machine_that_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", no_limit)
    assert (read_memory(tmp_path).total, read_memory(tmp_path).available) == (0, 0)


def test_disk(write: Write, tmp_path: Path) -> None:
    disk = read_disk(tmp_path)
    assert disk is not None
    assert disk.path == str(tmp_path.resolve())
    assert disk.free > 0
    assert read_disk(tmp_path / "none") is None


def test_this_machine() -> None:
    hardware = read_hardware(Path(__file__).parent)
    assert 1 <= hardware.cpu.usable_threads <= hardware.cpu.logical
    assert hardware.cpu.threads_reason
    assert 0 < hardware.memory.available <= hardware.memory.total
    assert hardware.disk is not None
    assert from_json(to_json(hardware)) == hardware


def test_systems_other_than_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    importlib.import_module("psutil")  # which looks at the platform once, when it is imported
    monkeypatch.setattr(sys, "platform", "darwin")
    hardware = read_hardware(root=tmp_path, environ={})
    assert 1 <= hardware.cpu.usable_threads <= hardware.cpu.logical
    assert 0 < hardware.memory.available <= hardware.memory.total
