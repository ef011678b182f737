"""Importance matrices: what is summed, going on after an interruption, refusals, files of upstream's form."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cli import COMMAND, hgguf
from tinygguf import build

from hybridgen_gguf.engine.jobs.imatrix_file import Matrix, read_imatrix, write_imatrix
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import BadFile, NotFound, UsageError
from hybridgen_gguf.make import imatrix as make_side
from hybridgen_gguf.make.imatrix import ImatrixOptions, imatrix
from hybridgen_gguf.make.quantize import QuantizeOptions, quantize
from hybridgen_gguf.plan import Limits


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "文本.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. 我喜欢猫。" * 12, encoding="utf-8")
    return path


def test_what_is_in_the_file(tiny: Path, text: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = ImatrixOptions(tiny, text, tmp_path / "i.gguf", chunk=64)
    done = imatrix(options, lambda at, of: seen.append((at, of)))
    matrix = read_imatrix(tmp_path / "i.gguf")
    assert (matrix.chunks, matrix.chunk_size, matrix.tokens) == (done.chunks, 64, done.chunks * 64)
    assert matrix.text_sha256 == done.text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert matrix.model_sha256 == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert len(matrix.sums) == done.entries == 15  # seven a layer, and the embedding, which makes the output here
    assert all(counts == [done.tokens] for counts in matrix.counts.values())
    assert all((sums > 0).all() for sums in matrix.sums.values())
    assert seen[-1] == (done.chunks, done.chunks)
    # Q, K and V have one input; so have gate and up.
    for same in (("attn_q", "attn_k"), ("attn_q", "attn_v"), ("ffn_gate", "ffn_up")):
        first, second = (matrix.sums[f"blk.0.{name}.weight"] for name in same)
        assert np.array_equal(first, second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.gguf"]


def test_first_layer_matches_the_embedding(tiny: Path, tmp_path: Path) -> None:
    # The first layer's attention reads the normalised embeddings (norm weights are 1): summed here by hand.
    (tmp_path / "t.txt").write_text("abcdefgh" * 30)
    imatrix(ImatrixOptions(tiny, tmp_path / "t.txt", tmp_path / "i.gguf", chunk=64, most_chunks=2))
    matrix = read_imatrix(tmp_path / "i.gguf")
    table = next(t for t in gguf.GGUFReader(tiny).tensors if t.name == "token_embd.weight").data
    # The vocabulary adds a start token and a space before the text; every chunk begins with the start token.
    bytes_of = [*b"\xe2\x96\x81", *(b"abcdefgh" * 30)]
    ids = [1, *(3 + b for b in bytes_of)][:128]
    ids[64] = 1
    rows = table[ids].astype(np.float64)
    normal = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5)
    assert matrix.sums["blk.0.attn_q.weight"][0] == pytest.approx((normal**2).sum(axis=0), rel=1e-4)


def test_going_on_gives_the_same_file(tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = imatrix(ImatrixOptions(tiny, text, tmp_path / "whole.gguf", chunk=64))
    facts = {"dataset": text.name, "text_sha256": whole.text_sha256, "tokens": whole.tokens, "chunk_size": 64}
    # Two chunks as an interrupted run would have saved them.
    part = imatrix(ImatrixOptions(tiny, text, tmp_path / "part.gguf", chunk=64, most_chunks=2))
    half = replace(read_imatrix(part.path), **facts)
    write_imatrix(tmp_path / "i.gguf.partial", half, exact=True)
    done = imatrix(ImatrixOptions(tiny, text, tmp_path / "i.gguf", chunk=64))
    assert done.resumed == 2
    ours, wanted = read_imatrix(tmp_path / "i.gguf"), read_imatrix(tmp_path / "whole.gguf")
    assert all(ours.sums[name] == pytest.approx(wanted.sums[name], rel=1e-6) for name in wanted.sums)
    assert not (tmp_path / "i.gguf.partial").exists()
    # A state of another text is not taken over.
    write_imatrix(tmp_path / "j.gguf.partial", replace(half, text_sha256="0" * 64), exact=True)
    assert imatrix(ImatrixOptions(tiny, text, tmp_path / "j.gguf", chunk=64)).resumed == 0
    assert make_side._SAVE_EVERY < 60


def test_killed_it_goes_on_where_it_had_saved(tmp_path: Path) -> None:
    model = build(tmp_path / "m.gguf", embd=256, ff=1024, layers=4)
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 250)
    command = ["imatrix", str(model), "-f", str(tmp_path / "t.txt"), "-o", str(tmp_path / "i.gguf"), "--chunk", "128"]
    often = f"import hybridgen_gguf.make.imatrix as m; m._SAVE_EVERY = 0.0\n{COMMAND[2]}"
    process = subprocess.Popen([*COMMAND[:2], often, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (tmp_path / "i.gguf.partial").exists():
        assert process.poll() is None and time.monotonic() < end, "it ended before it had saved"
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "i.gguf").exists()
    done = hgguf(*command, "--json")
    found = json.loads(done.stdout)
    assert 0 < found["resumed_chunks"] < found["chunks"]
    whole = imatrix(ImatrixOptions(model, tmp_path / "t.txt", tmp_path / "whole.gguf", chunk=128))
    assert whole.resumed == 0
    ours, wanted = read_imatrix(tmp_path / "i.gguf"), read_imatrix(tmp_path / "whole.gguf")
    assert all(ours.sums[name] == pytest.approx(wanted.sums[name], rel=1e-6) for name in wanted.sums)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["i.gguf", "m.gguf", "t.txt", "whole.gguf"]


def test_runs_where_the_planner_places_it(
    engine: Library, rpc_device: str, tiny: Path, text: Path, tmp_path: Path
) -> None:
    wanted = imatrix(ImatrixOptions(tiny, text, tmp_path / "cpu.gguf", chunk=64))
    for layers in (1, None):  # None: the planner takes what fits, here all
        place = Limits(n_gpu_layers=layers, threads=2)
        done = imatrix(ImatrixOptions(tiny, text, tmp_path / "i.gguf", 64, limits=place, rpc=(rpc_device,)))
        assert (done.chunks, done.entries) == (wanted.chunks, wanted.entries)
        ours, theirs = read_imatrix(done.path), read_imatrix(wanted.path)
        assert all(ours.sums[name] == pytest.approx(theirs.sums[name], rel=1e-2) for name in theirs.sums)


def test_experts_are_counted_each(tmp_path: Path) -> None:
    model = build(tmp_path / "moe.gguf", experts=8, wtype="f16")
    (tmp_path / "t.txt").write_text("aaaaaaaa" * 40)  # few words: some experts are never asked
    done = imatrix(ImatrixOptions(model, tmp_path / "t.txt", tmp_path / "i.gguf", chunk=64, most_chunks=2))
    matrix = read_imatrix(done.path)
    for layer in (0, 1):
        counts = matrix.counts[f"blk.{layer}.ffn_gate_exps.weight"]
        assert counts.shape == (8,) and counts.sum() == 2 * done.tokens  # two experts a token
        assert np.array_equal(counts, matrix.counts[f"blk.{layer}.ffn_down_exps.weight"])
        sums = matrix.sums[f"blk.{layer}.ffn_gate_exps.weight"]
        assert ((sums > 0).all(axis=1) == (counts > 0)).all() and not (counts > 0).all()
        # All experts see the router's input: theirs, weighted by visits, add up to twice what the router saw.
        router = matrix.sums[f"blk.{layer}.ffn_gate_inp.weight"]
        assert sums.sum(axis=0) == pytest.approx(2 * router[0], rel=1e-4)
    assert any("experts that no token of the text visited" in warning for warning in done.warnings)
    quantized = quantize(QuantizeOptions(model, tmp_path / "q.gguf", "Q4_0", imatrix=done.path))
    types = {t.type for t in quantized.forecast.tensors if "_exps" in t.name}
    assert types <= {"Q4_0", "Q4_1"} and not quantized.warnings


def test_refusals(tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "t.txt"
    short.write_text("only a few words")
    with pytest.raises(UsageError, match=r"the text has \d+ tokens; at least 128 are needed"):
        imatrix(ImatrixOptions(tiny, short, tmp_path / "i.gguf", chunk=64))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match="holds no text"):
        imatrix(ImatrixOptions(tiny, tmp_path / "empty.txt", tmp_path / "i.gguf"))
    with pytest.raises(UsageError, match="holds no text"):
        imatrix(ImatrixOptions(tiny, tmp_path, tmp_path / "i.gguf"))
    with pytest.raises(NotFound):
        imatrix(ImatrixOptions(tiny, tmp_path / "nowhere.txt", tmp_path / "i.gguf"))
    with pytest.raises(UsageError, match="too short"):
        imatrix(ImatrixOptions(tiny, short, tmp_path / "i.gguf", chunk=8))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "t.txt"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_files_keep_their_numbers(tmp_path_factory: pytest.TempPathFactory, values: list[float], chunks: int) -> None:
    path = tmp_path_factory.mktemp("matrix") / "i.gguf"
    sums = np.array(values).reshape(2, 2)
    matrix = Matrix({"blk.0.x.weight": sums}, {"blk.0.x.weight": np.array([3.0, 0.0])}, chunks, 512, "t", "ab", 7, "cd")
    write_imatrix(path, matrix, exact=True)
    found = read_imatrix(path)
    assert np.array_equal(found.sums["blk.0.x.weight"], sums)
    assert (found.chunks, found.dataset, found.text_sha256, found.tokens) == (chunks, "t", "ab", 7)
    weights = found.weights()["blk.0.x.weight"]
    assert weights[:2] == pytest.approx(sums[0] / 3, rel=1e-6)
    assert list(weights[2:]) == [1.0, 1.0]  # an expert that no token visited


def test_damaged_matrices(tiny: Path, tmp_path: Path) -> None:
    bad = Matrix({"a": np.array([[np.nan]])}, {"a": np.array([1.0])}, 1, 64)
    write_imatrix(tmp_path / "i.gguf", bad)
    with pytest.raises(BadFile, match="is damaged"):
        read_imatrix(tmp_path / "i.gguf")
    with pytest.raises(BadFile, match="is not an importance matrix"):
        read_imatrix(tiny)
