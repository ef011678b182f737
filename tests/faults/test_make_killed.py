"""convert and quantize killed with their helper process at several moments: the target is never half-written, the next
call says that it starts again, and gives the same bytes as a run that nobody disturbed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from hf_folder import write_folder
from make_cli import COMMAND, hgguf
from tinygguf import build

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the converter needs torch and transformers (extra `convert`)"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes about a second to quantize."""
    return build(tmp_path_factory.mktemp("model") / "m.gguf", embd=512, ff=2048, heads=8, kv=8, layers=4, wtype="f16")


def _kill_all(command: list[str], folder: Path, seconds: float, *, after_scratch: bool) -> bool:
    """Starts `command` and kills it and its children `seconds` after the start, or after a scratch file has appeared.
    False when it had ended before."""
    process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while after_scratch and not any(folder.glob(".hgguf-*")) and process.poll() is None:
        assert time.monotonic() < end, "no scratch file appeared"
        time.sleep(0.002)
    time.sleep(seconds)
    if process.poll() is not None:
        return False
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    for each in family:
        each.kill()
    psutil.wait_procs(family[:-1], 10)
    process.wait()
    return True


def _check(command: list[str], folder: Path, moments: list[tuple[float, bool]]) -> None:
    """`command` writes o.gguf in `folder`; a moment: seconds, and whether they count from the first scratch file."""
    target = folder / "o.gguf"
    interrupted = told = 0
    for seconds, after_scratch in moments:
        target.write_text("old")
        interrupted += _kill_all(command, folder, seconds, after_scratch=after_scratch) and target.read_text() == "old"
        left = sorted(path.name for path in folder.iterdir() if path.name != "o.gguf.json")
        assert left[-1] == "o.gguf" and all(name.startswith(".hgguf-") for name in left[:-1])
        done = hgguf(*command, "--json")
        assert done.returncode == 0, done.stderr
        warnings = json.loads(done.stdout)["warnings"]
        assert any("starts again from the beginning" in warning for warning in warnings) == (len(left) > 1)
        told += len(left) > 1
        assert hashlib.sha256(target.read_bytes()).hexdigest() == json.loads(done.stdout)["sha256"]
        assert sorted(path.name for path in folder.iterdir()) == ["o.gguf", "o.gguf.json"]
    assert interrupted >= 2 and told >= 1
    clean = hgguf(*command, "--json")
    assert json.loads(clean.stdout)["sha256"] == json.loads(done.stdout)["sha256"]


def test_quantize_killed_at_several_moments(model: Path, tmp_path: Path) -> None:
    command = ["quantize", str(model), str(tmp_path / "o.gguf"), "IQ3_S", "-t", "1", "--token-embedding-type", "Q8_0"]
    _check(command, tmp_path, [(0.05, False), (0.0, True), (0.2, True), (0.5, True)])


@needs_converter
@pytest.mark.slow
def test_convert_killed_at_several_moments(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    command = ["convert", str(folder), str(out / "o.gguf"), "--pre-tokenizer", "llama-bpe"]
    _check(command, out, [(1.0, False), (0.0, True), (0.1, True)])
