"""Quantizing interrupted, out of room, or fed a file that makes the engine abort: nothing half-written is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from make_cli import COMMAND, hgguf, refused
from tinygguf import build

from hybridgen_gguf.errors import EngineError
from hybridgen_gguf.make.job import run_job
from hybridgen_gguf.make.target import scratch_for, sweep


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes seconds to quantize to IQ3_S."""
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    build(str(path), embd=512, ff=2048, heads=8, kv=8, layers=4, wtype="f16")
    return path


def _start(slow: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "quantize", str(slow), str(folder / "o.gguf"), "IQ3_S", "-t", "1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _half_written(folder: Path) -> bool:
    return any(path.stat().st_size > 1 << 16 for path in folder.glob(".hgguf-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_interrupted_half_way(slow: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "o.gguf").write_text("old")
    process = _start(slow, tmp_path)
    _wait(lambda: _half_written(tmp_path) or process.poll() is not None)
    assert process.poll() is None, "it finished before it could be interrupted"
    process.send_signal(number)
    assert process.wait(30) != 0
    # After a SIGKILL the child notices that its parent is gone and tidies up; that takes a moment.
    _wait(lambda: not list(tmp_path.glob(".hgguf-*")), 30)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"o.gguf": "old"}


def test_leftovers_of_dead_processes_are_swept(tmp_path: Path) -> None:
    target = tmp_path / "o.gguf"
    mine = scratch_for(target)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = mine.with_name(mine.name.replace(f"-{os.getpid()}.", f"-{dead.pid}."))
    other = scratch_for(tmp_path / "other.gguf")
    for path in (mine, left, other):
        path.write_text("half")
    folder = left.with_suffix(".work")
    folder.mkdir()
    (folder / "between.gguf").write_text("half")
    assert sorted(sweep(target)) == [left, folder]
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


def test_no_room(tiny: Path, tmp_path: Path) -> None:
    # A limit on file size stands for a full disk: the write fails part-way, inside the engine.
    (tmp_path / "o.gguf").write_text("old")
    command = ["bash", "-c", 'ulimit -f 40; exec "$@"', "bash", *COMMAND]
    done = subprocess.run(
        [*command, "quantize", str(tiny), str(tmp_path / "o.gguf"), "Q8_0"], capture_output=True, text=True, timeout=60
    )
    refused(done, "disk is full")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"o.gguf": "old"}


def test_disk_too_small_is_told_before_work_starts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from hybridgen_gguf.errors import NoSpace
    from hybridgen_gguf.make.quantize import QuantizeOptions, quantize

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NoSpace, match=r"needs 10\d\.\d\d KiB, and its disk has 1000 B free"):
        quantize(QuantizeOptions(tiny, tmp_path / "o.gguf", "Q8_0"))
    assert list(tmp_path.iterdir()) == []


def test_an_abort_in_the_engine_is_an_error(tmp_path: Path) -> None:
    build(str(tmp_path / "dup.gguf"), tokens={100: "<0x41>"})
    with pytest.raises(EngineError, match="signal SIGABRT"):
        run_job("tokenize", {"model": str(tmp_path / "dup.gguf"), "texts": ["a"], "with_context": False})


def test_a_module_in_the_current_folder_is_not_imported(tiny: Path, tmp_path: Path) -> None:
    for name in ("numpy.py", "json.py", "ctypes.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = run_job("tokenize", {"model": str(tiny), "texts": ["a"], "with_context": False})
    assert found["tokens"][0][-1] == 100
    assert not (tmp_path / "RAN").exists()


def test_a_missing_library_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGGUF_ENGINE", str(tmp_path))
    done = hgguf("quantize", tiny, tmp_path / "o.gguf", "Q8_0")
    refused(done, "holds no engine")
    assert not (tmp_path / "o.gguf").exists()
