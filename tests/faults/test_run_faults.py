"""Homes, engines and processes as they may be: strange paths, nothing writable, two at once, SIGTERM."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import COMMAND, QUIET, call, refused, spawn

from hybridgen_gguf.engine import library
from hybridgen_gguf.errors import EngineError

Capture = pytest.CaptureFixture[str]


def test_a_home_with_spaces_and_chinese(tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "家 mit Leerzeichen 'q\""
    home.mkdir()
    model = home / "模型 é.gguf"
    shutil.copy(tiny, model)
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "缓存")}
    done = spawn("run", model, "-p", "你好" * 40, "-n", 2, LC_ALL="C", **environment)
    assert done.code == 0, done
    assert spawn("inspect", model, "--json", **environment).json["model"]["files"][0]["path"] == str(model)
    assert spawn("validate", model, **environment).out == f"{model}: ok\n"
    (home / "cut 模.gguf").write_bytes(tiny.read_bytes()[:999])
    refused(spawn("run", home / "cut 模.gguf", "-p", "x", **environment), 1, "cut 模.gguf")


def test_a_home_that_cannot_be_written(tiny: Path) -> None:
    """As on a read-only disk: nothing can be made under /proc, not even by root."""
    environment = {"HOME": "/proc", "XDG_CACHE_HOME": "/proc/cache", "XDG_CONFIG_HOME": "/proc/config"}
    assert spawn("run", tiny, "-p", "hi", "-n", 2, **environment).code == 0
    assert spawn("models", **environment).code == 0
    done = spawn("pull", "smollm2-135m", **environment)
    refused(done, 1, "/proc/cache")


def test_no_home_at_all(tiny: Path) -> None:
    environment = {key: value for key, value in {**os.environ, **QUIET}.items() if not key.startswith(("HOME", "XDG_"))}
    done = subprocess.run(
        [*COMMAND, "run", tiny, "-p", "hi", "-n", "1"], capture_output=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done


def test_two_at_once(tiny: Path) -> None:
    running = [
        subprocess.Popen(
            [*COMMAND, "run", tiny, "-p", "hi", "-n", "8", "-s", "1", "--ignore-eos"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **QUIET},
        )
        for _ in range(2)
    ]  # fmt: skip
    texts = {process.communicate(timeout=60)[0] for process in running}
    assert len(texts) == 1 and all(process.returncode == 0 for process in running)


def test_a_nice_process(tiny: Path) -> None:
    done = subprocess.run(
        ["nice", "-n", "19", *COMMAND, "run", str(tiny), "-p", "hi", "-n", "2"],
        capture_output=True, env={**os.environ, **QUIET}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_a_chinese_prompt_of_5000_characters(smollm2: Path, capsys: Capture) -> None:
    done = call(capsys, "run", smollm2, "-p", "今天天气很好。" * 715, "-n", 2, "--dry-run", "--json")
    assert done.code == 0 and 8192 >= done.json["plan"]["n_ctx"] >= 5000


def test_a_terminated_run_leaves_no_process(smollm2: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(smollm2), "-p", "hi", "-n", "3000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **QUIET}, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.terminate()
    process.stdout.close()
    assert process.wait(30) == -signal.SIGTERM
    deadline = time.monotonic() + 10
    while children_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(process.pid) == []


def children_of(pid: int) -> list[str]:
    """Processes whose session or parent was `pid`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and str(pid) in fields[1:4]:
            found.append(status.parent.name)
    return found


def test_an_engine_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    refused(spawn("run", tiny, "-p", "hi", HGGUF_ENGINE=str(tmp_path)), 1, str(tmp_path), "holds no engine")
    refused(spawn("engine", HGGUF_ENGINE="/nowhere"), 1, "/nowhere")


def test_an_engine_that_is_no_library(tmp_path: Path, tiny: Path) -> None:
    for name in ("libllama.so", "libggml.so", "libggml-base.so"):
        (tmp_path / name).write_bytes(b"not a library")
    refused(spawn("engine", HGGUF_ENGINE=str(tmp_path)), 1, "cannot be loaded")
    refused(spawn("run", tiny, "-p", "hi", HGGUF_ENGINE=str(tmp_path)), 1, "cannot be loaded")


def test_python_warnings_are_ours() -> None:
    """What a module warns of by Python's means is shown as every other warning."""
    code = (
        "import sys, warnings\nfrom hybridgen_gguf.cli import show\nshow.prepare_streams()\n"
        "warnings.warn('the engine has no patches', RuntimeWarning)\n"
    )
    done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: the engine has no patches\n"


def test_an_engine_that_another_user_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout that several users read links to the cache of the one who ran scripts/setup."""
    (tmp_path / "hgguf-engine").symlink_to("/home/somebody/.cache/hgguf/engine/0123")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for variable in ("HGGUF_ENGINE", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv(variable, raising=False)

    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(EngineError, match=r"/home/somebody/.* may not be read by this user") as caught:
        library.find()
    assert "scripts/setup" in caught.value.hint
