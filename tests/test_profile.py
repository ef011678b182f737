"""What a profile measures, remembers and refuses. Speeds are not judged: other processes may be running."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hybridgen_gguf.engine.graphs.kernels import AttentionNodes, Kernels, Matrices
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import EngineError
from hybridgen_gguf.machine import measure as profiling
from hybridgen_gguf.machine import profile
from hybridgen_gguf.machine.hardware import Device, Hardware, KernelRate
from hybridgen_gguf.machine.probe import read_hardware
from hybridgen_gguf.machine.profile import Profile, fingerprint_of, with_profile
from hybridgen_gguf.machine.rates import Rates

NOW = datetime(2026, 11, 29, tzinfo=UTC)


@pytest.fixture(scope="module")
def measured(engine: Library) -> Profile:
    hardware = read_hardware()
    return profiling.measure(replace(hardware, cpu=replace(hardware.cpu, usable_threads=1)), seconds=6.0)


def test_measures_what_the_planner_needs(measured: Profile) -> None:
    rates = Rates(measured.hardware)
    assert rates.measured
    operations = {rate.operation for rate in measured.hardware.cpu.kernels}
    attentions = {"attention-1024", "attention-1024-short", "attention-8192", "attention-prompt"}
    assert {"node", "matvec", "matmul", *attentions} <= operations
    assert all(rate.gbps >= 0 and rate.gflops > 0 for rate in measured.hardware.cpu.kernels)
    assert measured.hardware.memory.read[0].gbps > 0.1


def test_saved_and_loaded(measured: Profile, tmp_path: Path) -> None:
    path = profile.save(measured, tmp_path / "ordner 文件" / "profile.json")
    assert profile.load(path) == measured


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"fingerprint": "a", "measured": "x", "seconds": 1, "busy": 0}'])
def test_a_damaged_profile_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    assert profile.load(path) is None
    assert profile.load(tmp_path / "missing.json") is None


def entry(hardware: Hardware, age: timedelta = timedelta(0), fingerprint: str = "") -> Profile:
    rates = (KernelRate("matvec", "Q4_K", 1, 10.0, 20.0),)
    known = replace(hardware, cpu=replace(hardware.cpu, kernels=rates))
    when = (datetime.now(UTC) - age).isoformat(timespec="seconds")
    return Profile(fingerprint or fingerprint_of(hardware), when, 1.0, 0.0, known)


def test_used_on_this_machine_alone(engine: Library) -> None:
    hardware = read_hardware()
    used, why = with_profile(hardware, entry(hardware))
    assert used.cpu.kernels and not why
    other, why = with_profile(hardware, entry(hardware, fingerprint="another"))
    assert other == hardware and "another machine" in why
    old, why = with_profile(hardware, entry(hardware, timedelta(days=40)))
    assert old.cpu.kernels and "40 days" in why
    busy, why = with_profile(hardware, replace(entry(hardware), busy=0.9))
    assert busy == hardware and "busy" in why
    assert with_profile(hardware, None) == (hardware, "this machine was not measured yet: run `hgguf profile`")


def test_another_device_is_another_machine(engine: Library) -> None:
    hardware = read_hardware()
    more = replace(hardware, devices=(*hardware.devices, Device("RPC0", "rpc", memory_total=1 << 30)))
    assert fingerprint_of(more) != fingerprint_of(hardware)


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))])
def test_thread_counts(most: int, counts: tuple[int, ...]) -> None:
    assert profiling.thread_counts(most) == counts


def test_kernels_on_the_rpc_device(engine: Library, rpc_device: str) -> None:
    """The same code that measures a GPU."""
    engine.add_rpc(rpc_device)
    with Kernels("RPC0") as kernels:
        for work in (Matrices("Q4_K", 256, 256, 1, 2), AttentionNodes("F16", 256, 1, 4, 2, 64, 1), 10):
            run = kernels.graph(work)
            assert run is not None
            run()
        copies = kernels.copies(1 << 16, pinned=False)
        assert copies is not None
        for copy in copies:
            copy()
        assert kernels.copies(1 << 16, pinned=True) is None  # a server has no page-locked memory to offer
    with pytest.raises(EngineError):
        Kernels("CUDA7")
