"""A container with a CPU quota; no more threads than cores by default (D-11, D-12)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridgen_gguf.machine.probe_cpu import read_cpu


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"sys/devices/system/cpu/online": "0-15", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"sys/fs/cgroup/cpu.max": "765000 100000"}, 7),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/box",
                "proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    cpu = read_cpu(machine(tmp_path, files), range(16))
    assert cpu.usable_threads == threads
    assert ("quota" in cpu.threads_reason) == (threads < 16)


def test_the_least_of_mask_and_quota(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/cpu.max": "765000 100000"})
    assert read_cpu(root, range(3)).usable_threads == 3
    assert "affinity" in read_cpu(root, range(3)).threads_reason
    assert read_cpu(root, range(9)).usable_threads == 7


def test_process_bound_to_one_cpu() -> None:
    """As under `taskset -c 0`."""
    cpu = min(os.sched_getaffinity(0))
    code = (
        "from hybridgen_gguf.machine.probe import read_hardware as r; c = r().cpu; print(c.usable_threads, c.affinity)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\n{code}"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["1", f"({cpu},)"]
