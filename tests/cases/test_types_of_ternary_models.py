"""TQ1_0 and such, chosen for an ordinary model: a warning says what they cost. Ternary models get none."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tinygguf
from command_line import call

from hybridgen_gguf.model_file.header import read_header

Capture = pytest.CaptureFixture[str]


def ternary(path: Path, wtype: str) -> Path:
    """As tinygguf's models, but the matrices of the layers hold -s, 0 and s."""
    tinygguf.build(path, embd=256, ff=256, heads=8, wtype=wtype)
    rng = np.random.default_rng(5)
    header = read_header(path)
    with path.open("r+b") as file:
        for tensor in header.tensors:
            if len(tensor.shape) == 2:
                values = rng.choice([-0.05, 0.0, 0.05], tensor.parameters)
                file.seek(header.data_offset + tensor.offset)
                file.write(values.astype("<f4" if tensor.type == "F32" else "<f2").tobytes())
    return path


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "Q1_0", "Q2_0"])
def test_an_ordinary_model(tmp_path: Path, capsys: Capture, kind: str) -> None:
    model = tinygguf.build(tmp_path / "m.gguf", embd=256, ff=256, heads=8, wtype="f16")
    for more in ((), ("--dry-run",)):
        done = call(capsys, "quantize", model, tmp_path / "o.gguf", kind, *more)
        assert done.code == 0 and f"warning: {kind} keeps" in done.err and "will write nonsense" in done.err
    done = call(capsys, "quantize", model, tmp_path / "p.gguf", "Q4_K_M", "--tensor-type", f"ffn_up={kind}")
    assert done.code == 0 and f"warning: {kind} keeps" in done.err


@pytest.mark.parametrize("wtype", ["f16", "f32"])
@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_a_ternary_model(tmp_path: Path, capsys: Capture, kind: str, wtype: str) -> None:
    model = ternary(tmp_path / "m.gguf", wtype)
    done = call(capsys, "quantize", model, tmp_path / "o.gguf", kind)
    assert done.code == 0 and "warning" not in done.err
    kinds = {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "o.gguf").tensors}
    assert kind in kinds
