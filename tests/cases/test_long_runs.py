"""A-02: a long run of one character. It is tokenized, or one line says why not; no process dies, no file is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizer_models
from command_line import refused, spawn

import hybridgen_gguf

RUN = "A" * 60_000 + "\n"
PRES = ("gpt-4o", "tekken", "deepseek-v3", "llama-bpe")  # the last has a splitter written by hand


@pytest.fixture(scope="module", params=PRES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_models.write(tmp_path_factory.mktemp("runs") / "b.gguf", "gpt2", request.param, weights=True)


@pytest.mark.parametrize("way", ["file", "stdin", "system"])
def test_a02_a_long_run_on_the_command_line(model: Path, tmp_path: Path, way: str) -> None:
    """The context holds 256 tokens: the prompt is refused by its size, in one line, as with a hand-made splitter."""
    (tmp_path / "a.txt").write_text(RUN)
    ways = {"file": ["--raw", "-f", tmp_path / "a.txt"], "stdin": ["--raw"], "system": ["-p", "hi", "-sys", RUN]}
    done = spawn("run", model, "-c", 256, "-n", 2, *ways[way], stdin=RUN.encode() if way == "stdin" else b"")
    refused(done, 3, "256")


def test_a02_a_long_run_without_a_context_size(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(RUN)
    done = spawn("run", model, "--raw", "-n", 2, "-f", tmp_path / "a.txt")
    assert done.code in (0, 3) and "damaged" not in done.err and "Traceback" not in done.err, done


def test_a02_the_same_process_serves_later_requests(model: Path) -> None:
    with hybridgen_gguf.load(str(model), n_ctx=256) as loaded:
        assert len(loaded.encode(RUN).tokens) >= 60_000 // 16
        assert loaded.encode("hi").tokens
