"""D-05, D-06, D-07, and D-01 for quantize: through the command line, as a user meets them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import tinygguf
from make_cli import hgguf, refused


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("keep", [300_000, -1, 24, 0])
def test_d01_a_cut_file_is_refused(tiny: Path, tmp_path: Path, keep: int) -> None:
    content = tiny.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:keep])
    done = hgguf("quantize", tmp_path / "cut.gguf", tmp_path / "o.gguf", "Q4_K_M")
    refused(done, "cut.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["cut.gguf"]


def test_d05_output_is_the_input_under_any_name(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(tiny.read_bytes())
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    (tmp_path / "c.gguf").hardlink_to(source)
    (tmp_path / "sub").mkdir()
    before = _digest(source)
    for name in ("a.gguf", "./a.gguf", "b.gguf", "c.gguf", "sub/../a.gguf", str(source)):
        refused(hgguf("quantize", "a.gguf", name, "Q8_0", cwd=tmp_path), "is the input")
        assert _digest(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf", "sub"]


def test_d05_output_is_the_imatrix_or_the_text(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("word " * 400)
    refused(hgguf("imatrix", tiny, "-f", text, "-o", text), "is the input")
    refused(hgguf("imatrix", tiny, "-f", text, "-o", tiny), "is the input")
    assert text.read_text() == "word " * 400


def test_d05_convert_into_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for target in (folder / "o.gguf", folder / ".." / "hf" / "o.gguf"):
        refused(hgguf("convert", folder, target), "lies inside the input folder")
    assert [p.name for p in folder.iterdir()] == ["config.json"]


def test_d06_a_quantized_source_keeps_the_old_output(smollm2: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_text("old\n")
    done = hgguf("quantize", smollm2, target, "Q4_K_M")
    refused(done, "already quantized (Q4_1)")
    assert "--allow-requantize" in done.stderr
    assert target.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_d07_forecast_equals_the_file(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "o.gguf"
    forecast = hgguf("quantize", tiny, target, "Q4_K_M", "--dry-run")
    assert forecast.returncode == 0, forecast.stderr
    assert "14 of 20 tensors" in forecast.stdout
    told = json.loads(hgguf("quantize", tiny, target, "Q4_K_M", "--dry-run", "--json").stdout)
    assert list(tmp_path.iterdir()) == []
    done = json.loads(hgguf("quantize", tiny, target, "Q4_K_M", "--json").stdout)
    assert target.stat().st_size == told["bytes"] == done["bytes"]
    assert done["types"] == told["types"] == {"Q5_0": 12, "F32": 5, "Q8_0": 3}
    assert done["sha256"] == _digest(target)
    assert round(told["bpw"], 2) == 6.48
    refused(hgguf("quantize", tiny, target, "Q4_K_M", "--strict"), "14 of 20 tensors")


def test_d07_strict_dry_run_is_an_error_too(tiny: Path, tmp_path: Path) -> None:
    done = hgguf("quantize", tiny, tmp_path / "o.gguf", "Q4_K_M", "--strict", "--dry-run")
    assert done.returncode == 1
    assert "14 of 20 tensors cannot be" in done.stderr


@pytest.mark.real
def test_d07_a_real_model_with_rows_of_576(smollm2: Path, tmp_path: Path) -> None:
    target = tmp_path / "o.gguf"
    arguments = ("quantize", smollm2, target, "Q4_K_M", "--allow-requantize", "--json")
    told = json.loads(hgguf(*arguments, "--dry-run").stdout)
    assert len(told["fallbacks"]) == 180
    done = hgguf(*arguments)
    assert "quality drops" in done.stderr
    assert target.stat().st_size == told["bytes"]
    assert len(gguf.GGUFReader(target).tensors) == 272


@pytest.mark.parametrize(
    ("width", "kind", "fallbacks"),
    [(40, "Q4_K_M", 15), (48, "IQ4_XS", 15), (96, "Q2_K", 14), (256, "MXFP4_MOE", 0), (320, "TQ1_0", 14)],
)
def test_d07_forecasts_of_any_width(tmp_path: Path, width: int, kind: str, fallbacks: int) -> None:
    """Rows that are no multiple of 256, of 32, or of 16."""
    source = tinygguf.build(tmp_path / "m.gguf", embd=width, ff=3 * width, heads=2, kv=2)
    target = tmp_path / "o.gguf"
    told = json.loads(hgguf("quantize", source, target, kind, "--dry-run", "--json").stdout)
    assert len(told["fallbacks"]) == fallbacks
    assert hgguf("quantize", source, target, kind).returncode == 0
    assert target.stat().st_size == told["bytes"]
