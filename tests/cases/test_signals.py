"""A signal at any moment of any verb: the terminal comes back whole, the process ends at once, no child is left."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import tinygguf
from command_line import COMMAND, QUIET

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
SECONDS = 6.0  # that a busy machine may take for what takes one


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes some seconds to be read through, tuned or quantized."""
    path = tmp_path_factory.mktemp("large") / "m.gguf"
    return tinygguf.build(path, embd=512, ff=2048, heads=8, kv=8, layers=6, ctx=4096, wtype="f16")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 4000, encoding="utf-8")
    return path


class Shown:
    """A process of which stderr is a terminal, and what it wrote there."""

    def __init__(self, *arguments: object, home: Path) -> None:
        """`home`: where a verb that ends too early would remember what it measured."""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=slave,
            env={**os.environ, **QUIET, "TERM": "xterm", "HGGUF_PROFILE": f"{home}/p.json", "HGGUF_DATA": str(home)},
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def read(self, until: bytes = b"", seconds: float = 60) -> bytes:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and until in self.seen):
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:
                    break
        return self.seen

    def end(self, *numbers: int) -> tuple[int, float]:
        """(exit code as a shell sees it, seconds from the first of the signals `numbers` to the end)."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        start = time.monotonic()
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.05)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        took = time.monotonic() - start
        self.read(seconds=1)
        os.close(self.master)
        _, alive = psutil.wait_procs(children, 5)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        code = self.process.returncode
        return (128 - code if code < 0 else code), took


def verbs(large: Path, text: Path, out: Path) -> dict[str, tuple[object, ...]]:
    return {
        "run": ("run", large, "--raw", "-f", text, "-c", 200_000, "-n", 1),
        "tune": ("tune", large, "--seconds", 60, "-c", 2048),
        "imatrix": ("imatrix", large, "-f", text, "-o", out / "m.imatrix"),
        "quantize": ("quantize", large, out / "q.gguf", "IQ3_S", "--token-embedding-type", "Q8_0", "-t", 1),
        "profile": ("profile",),
        "bench": ("bench", large, "-p", 4096, "-n", 0),
    }


@pytest.mark.parametrize("verb", ["run", "tune", "imatrix", "quantize", "profile", "bench"])
@pytest.mark.parametrize("numbers", [("SIGTERM",), ("SIGHUP",), ("SIGQUIT",), ("SIGINT",), ("SIGINT", "SIGINT")])
def test_the_cursor_comes_back(large: Path, text: Path, tmp_path: Path, verb: str, numbers: tuple[str, ...]) -> None:
    shown = Shown(*verbs(large, text, tmp_path)[verb], home=tmp_path)
    assert HIDE in shown.read(HIDE)
    time.sleep(0.5)
    code, took = shown.end(*(getattr(signal, name) for name in numbers))
    assert code == 128 + getattr(signal, numbers[0])
    assert took < SECONDS
    assert shown.seen.rindex(SHOW) > shown.seen.rindex(HIDE), shown.seen[-300:]
    assert b"Traceback" not in shown.seen and b"error:" not in shown.seen, shown.seen[-1000:]
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".partial")] == []


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_pipe_that_nobody_reads(tiny: Path, number: str) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        while True:  # full, so that the first piece of the answer waits for ever
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
        process = subprocess.Popen(
            [*COMMAND, "run", tiny, "-p", "hi", "-n", "50", "--ignore-eos"], stdin=subprocess.DEVNULL, stdout=writer,
            stderr=subprocess.PIPE, env={**os.environ, **QUIET},
        )  # fmt: skip
        _until_it_writes(process.pid)
        start = time.monotonic()
        process.send_signal(getattr(signal, number))
        _, told = process.communicate(timeout=60)
        assert time.monotonic() - start < SECONDS and b"Traceback" not in told
        assert process.returncode in (128 + getattr(signal, number), -getattr(signal, number))
    finally:
        os.close(reader)
        os.close(writer)


def _until_it_writes(pid: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and "pipe" not in Path(f"/proc/{pid}/wchan").read_text():
        time.sleep(0.05)
    assert time.monotonic() < end


@pytest.mark.parametrize("number", ["SIGHUP", "SIGINT"])
def test_what_was_ignored_stays_ignored(tiny: Path, number: str) -> None:
    """nohup, and a script's `&`."""
    process = subprocess.Popen(
        [*COMMAND, "run", tiny, "-p", "hi", "-n", "8", "--ignore-eos"], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **QUIET},
        preexec_fn=lambda: signal.signal(getattr(signal, number), signal.SIG_IGN),
    )  # fmt: skip
    while process.poll() is None:
        process.send_signal(getattr(signal, number))
        time.sleep(0.05)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 0 and out and b"8 tokens" in told
