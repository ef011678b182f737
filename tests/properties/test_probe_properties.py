"""probe and hardware: whatever the files or a cached description hold, an answer or an HgError, never anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridgen_gguf.errors import BadFile
from hybridgen_gguf.machine.hardware import Cpu, Hardware, Memory, from_json, to_json
from hybridgen_gguf.machine.probe import read_memory
from hybridgen_gguf.machine.probe_cpu import parse_cpu_list, read_cpu

FILES = (
    "proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo", "proc/cpuinfo", "proc/self/statm",
    "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/memory.current",
    "sys/devices/system/cpu/online", "sys/devices/system/cpu/cpu0/topology/core_cpus_list",
    "sys/devices/system/cpu/cpu0/cpu_capacity", "sys/devices/system/cpu/cpu0/cache/index0/size",
    "sys/devices/system/cpu/cpu0/cache/index0/level", "sys/devices/system/node/node0/meminfo",
)  # fmt: skip
WORDS = [
    "0",
    "1",
    "-1",
    "0-3",
    "max",
    "9" * 25,
    "²",
    "x",
    ":",
    "::",
    "0::/..",
    "/",
    " ",
    "\n",
    "kB",
    "MemTotal:",
    " - ",
    "cgroup2",
    ",",
]
TEXTS = st.one_of(
    st.binary(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map(lambda w: "".join(w).encode())
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXTS, min_size=len(FILES), max_size=len(FILES)))
def test_any_files_give_an_answer(root: Path, texts: list[bytes]) -> None:
    for name, text in zip(FILES, texts, strict=True):
        (root / name).write_bytes(text)
    cpu, memory = read_cpu(root, [0, 1]), read_memory(root)
    assert 1 <= cpu.usable_threads <= max(cpu.physical, 1)
    assert cpu.threads_reason
    assert memory.available >= 0
    assert from_json(to_json(Hardware(cpu, memory))) == Hardware(cpu, memory)


@given(st.frozensets(st.integers(0, 300)))
def test_cpu_lists_there_and_back(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(",".join(str(cpu) for cpu in cpus)) == tuple(sorted(cpus))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
PLAIN = to_json(Hardware(Cpu("c", "a", 1, 1, 1, "r"), Memory(1, 1)))


@given(st.sampled_from(sorted(PLAIN)), st.sampled_from(sorted(PLAIN["cpu"]) + sorted(PLAIN["memory"])), JSON)
def test_damaged_descriptions_are_bad_files(part: str, field: str, value: object) -> None:
    damaged = (
        {**PLAIN, part: value} if not isinstance(PLAIN[part], dict) else {**PLAIN, part: {**PLAIN[part], field: value}}
    )
    try:
        assert isinstance(from_json(damaged), Hardware)
    except BadFile as error:
        assert "\n" not in error.what
