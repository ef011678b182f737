"""The report's figures: zero for the same model, against a reference in float64, worse for coarser types."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tinygguf import build

from hybridgen_gguf.engine.jobs.compare import _log_probabilities
from hybridgen_gguf.errors import Failed, HgError, UsageError
from hybridgen_gguf.make.pipeline import MakeOptions, make
from hybridgen_gguf.make.quantize import QuantizeOptions, quantize
from hybridgen_gguf.make.report import ReportOptions, as_json, plot, report, table
from hybridgen_gguf.model_file.split import open_model_file


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. 我喜欢猫。" * 8, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several block sizes."""
    path = tmp_path_factory.mktemp("sharp") / "sharp.gguf"
    build(str(path), embd=64, ff=256, layers=1, seed=5)
    return path


def test_same_model_and_coarser_types(sharp: Path, text: Path, tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_0"):
        quantize(QuantizeOptions(sharp, tmp_path / f"{kind}.gguf", kind, pure=True))
    paths = (sharp, tmp_path / "Q8_0.gguf", tmp_path / "Q4_0.gguf")
    done = report(ReportOptions(sharp, paths, text, chunk=64))
    same, fine, coarse = done.models
    assert (same.kld_mean, same.kld_99, same.ppl_ratio, same.top1) == (0.0, 0.0, 1.0, 1.0)
    assert 0 < fine.kld_mean < coarse.kld_mean
    assert 0 < fine.kld_median <= fine.kld_99
    assert fine.top1 > coarse.top1
    assert coarse.bpw < fine.bpw < same.bpw == 32
    assert all(speed > 0 for q in done.models for speed in (q.prompt_tps, q.decode_tps, q.decode_tps_base))
    assert done.scored == done.tokens // 64 * 31
    assert len(table(done.models)) == 5
    content = as_json(done)
    assert content["quality"] == {"kld": 0.0, "ppl_ratio": 1.0, "top1": 1.0}
    json.dumps(content)


def test_log_probabilities_at_the_extremes() -> None:
    logits = np.array([[0.0, 1e4, -1e4, 3.0], [5.0, 5.0, 5.0, 5.0]], dtype=np.float32)
    found = _log_probabilities(logits)
    assert np.isfinite(found).all()
    assert found[1] == pytest.approx(np.log(np.full(4, 0.25)))
    assert np.exp(found).sum(axis=1) == pytest.approx([1.0, 1.0])


def test_refusals(sharp: Path, text: Path, tmp_path: Path) -> None:
    build(str(tmp_path / "other.gguf"), extra=["new"])
    with pytest.raises(UsageError, match="different vocabularies"):
        report(ReportOptions(sharp, (tmp_path / "other.gguf",), text, chunk=64))
    (tmp_path / "short.txt").write_text("hi")
    with pytest.raises(UsageError, match="at least 64 are needed"):
        report(ReportOptions(sharp, (sharp,), tmp_path / "short.txt", chunk=64))


def test_plot_says_what_is_missing_or_draws(sharp: Path, text: Path, tmp_path: Path) -> None:
    done = report(ReportOptions(sharp, (sharp,), text, chunk=64, most_chunks=1, speed=False))
    try:
        plot(done.models, tmp_path / "p.png")
    except Failed as error:
        assert "matplotlib" in error.what
        assert list(tmp_path.iterdir()) == []
    else:
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("target", [{"target_bpw": 7.0}, {"target_bytes": 75_000}])
def test_types_chosen_for_a_size(sharp: Path, text: Path, tmp_path: Path, target: dict[str, float]) -> None:
    quantizing = QuantizeOptions(sharp, tmp_path / "o.gguf", "")
    stages: set[str] = set()
    options = MakeOptions(quantizing, text=text, chunk=64, most_chunks=2, report=True, **target)  # type: ignore[arg-type]
    made = make(options, lambda stage, *_: stages.add(stage))
    file = open_model_file(tmp_path / "o.gguf")
    weights = sum(tensor.parameters for tensor in file.tensors)
    if "target_bpw" in target:
        assert sum(tensor.bytes for tensor in file.tensors) * 8 / weights <= 7.0
    else:
        assert 65_000 < file.bytes <= 75_000
    assert len({tensor.type for tensor in file.tensors}) > 2
    assert {"measuring types", "measuring sensitivity", "quantizing", "measuring quality"} <= stages
    assert made.report is not None
    manifest = json.loads(made.result.manifest.read_text(encoding="utf-8"))
    assert manifest["report"]["models"][0]["kld_mean"] == asdict(made.report)["models"][0]["kld_mean"]
    assert {t.name: t.type for t in file.tensors} == manifest["tensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.gguf", "o.gguf.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_bpw": 5.0, "target_bytes": 5}, "were both given"),
        ({"target_bpw": 0.5}, "--target-bpw 0.5 is out of range"),
        ({"target_bpw": 5.0, "text": None}, "measure on a text"),
        ({}, "no TYPE was given"),
    ],
)
def test_options_that_cannot_go_together(
    sharp: Path, text: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    options: dict[str, object] = {"text": text, **changes}
    with pytest.raises(UsageError, match=words):
        make(MakeOptions(QuantizeOptions(sharp, tmp_path / "o.gguf", ""), **options), lambda *_: None)  # type: ignore[arg-type]


def test_target_is_checked_before_measuring(sharp: Path, text: Path, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        pytest.fail("work began")

    for target, words in (
        (sharp, "is the input"),
        (text, "is the input"),
        (tmp_path / "no" / "o.gguf", "does not exist"),
    ):
        with pytest.raises(HgError, match=words):
            make(MakeOptions(QuantizeOptions(sharp, target, ""), target_bpw=5.0, text=text), never)
