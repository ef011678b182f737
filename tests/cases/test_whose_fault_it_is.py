"""Messages name the right file, tensor and cause: bad numbers, wrong shapes, parts joined by `cat`."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import rawgguf as raw
import tinygguf
from command_line import call, refused

from hybridgen_gguf.model_file.header import read_header

Capture = pytest.CaptureFixture[str]


def with_value(path: Path, tensor: str, value: float, wtype: str = "f16") -> Path:
    """A model with one number of `tensor` replaced."""
    tinygguf.build(path, embd=256, ff=256, heads=8, wtype=wtype)
    header = read_header(path)
    found = next(t for t in header.tensors if t.name == tensor)
    kind = "<f4" if found.type == "F32" else "<f2"
    with path.open("r+b") as file:
        file.seek(header.data_offset + found.offset + np.dtype(kind).itemsize * (found.parameters // 2))
        file.write(np.array([value], kind).tobytes())
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.0.ffn_up.weight", "blk.1.attn_norm.weight"])
def test_weights_that_are_no_numbers(tmp_path: Path, capsys: Capture, tensor: str, value: float) -> None:
    model = with_value(tmp_path / "m.gguf", tensor, value)
    told = f"tensor '{tensor}' holds NaN or infinity in 1 value"
    done = call(capsys, "validate", model)
    assert done.code == 1 and done.err == f"error: {model}: {told}\n"
    assert call(capsys, "validate", "--no-check-tensors", model).code == 0
    for kind in ("Q8_0", "Q4_K_M", "COPY"):
        done = call(capsys, "quantize", model, tmp_path / "o.gguf", kind)
        refused(done, 1, f"tensor '{tensor}' of the source holds NaN or infinity")
    if "norm" not in tensor:
        refused(call(capsys, "run", model, "-p", "hi", "-n", 3, "--raw"), 1, "m.gguf", told)


def test_scales_of_a_quantized_model(tmp_path: Path, capsys: Capture) -> None:
    model = tinygguf.build(tmp_path / "m.gguf", embd=256, ff=256, heads=8, wtype="f16")
    assert call(capsys, "quantize", model, tmp_path / "q.gguf", "Q4_K_M").code == 0
    header = read_header(tmp_path / "q.gguf")
    tensor = next(t for t in header.tensors if t.name == "blk.0.ffn_up.weight")
    assert tensor.type == "Q4_K"
    with (tmp_path / "q.gguf").open("r+b") as file:
        file.seek(header.data_offset + tensor.offset + 144 + 2)  # the second block's dmin
        file.write(b"\x00\x7e")
    done = call(capsys, "validate", tmp_path / "q.gguf")
    assert done.code == 1 and "'blk.0.ffn_up.weight' holds NaN or infinity in 1 scale" in done.err


def _shape_changed(path: Path, tensor: str, dimension: int, to: int) -> Path:
    """The header says `to` for one dimension of `tensor`; nothing else changes."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor) + 4 + 8 * dimension
    data[at : at + 8] = struct.pack("<Q", to)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("verb", ["run", "quantize", "inspect", "validate", "plan"])
@pytest.mark.parametrize("to", [0, 64, 1 << 20])
@pytest.mark.parametrize("tensor", ["blk.0.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_the_tensor_with_the_wrong_shape_is_named(
    tmp_path: Path, capsys: Capture, tensor: str, to: int, verb: str
) -> None:
    if (tensor, to, verb) == ("output_norm.weight", 64, "inspect"):
        pytest.skip("the last tensor; its row's right length stands in no header")
    model = tinygguf.build(tmp_path / "m.gguf", embd=256, ff=256, heads=8)
    _shape_changed(model, tensor, 0, to)
    more = {"run": ("-p", "hi"), "quantize": (tmp_path / "o.gguf", "Q8_0")}.get(verb, ())
    done = call(capsys, verb, model, *more)
    assert done.code == 1 and f"tensor '{tensor}'" in done.err, done
    assert ("with a dimension of zero" in done.err) == (to == 0)


def test_a_wrong_offset_is_still_the_tensors_own(tmp_path: Path, capsys: Capture) -> None:
    tensors = [raw.tensor("a", [8], 0), raw.tensor("b", [8], 64), raw.tensor("c", [8], 64)]
    path = raw.write(tmp_path, raw.gguf_bytes([], tensors, 96))
    done = call(capsys, "validate", path)
    assert done.code == 1 and "tensor 'b' leaves a hole before it" in done.err


@pytest.mark.parametrize("name", ["joined.gguf", "m-00001-of-00003.gguf"])
@pytest.mark.parametrize("verb", ["run", "quantize", "inspect", "validate", "plan"])
def test_parts_joined_into_one_file(tmp_path: Path, capsys: Capture, name: str, verb: str) -> None:
    (tmp_path / "parts").mkdir()
    parts = sorted(tinygguf.build(tmp_path / "parts" / "m.gguf", split=8).parent.iterdir())
    assert len(parts) == 3
    (tmp_path / name).write_bytes(b"".join(part.read_bytes() for part in parts))
    more = {"run": ("-p", "hi"), "quantize": (tmp_path / "o.gguf", "Q8_0")}.get(verb, ())
    done = call(capsys, verb, tmp_path / name, *more)
    assert done.code == 1 and "holds several parts of a model of 3, one behind the other" in done.err
