"""Importance matrices that cannot work are refused before work begins, in full; the older form (`.dat`) is read."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinygguf
from command_line import call, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.engine.jobs.imatrix_file import Matrix, read_imatrix, read_summary, write_imatrix
from hybridgen_gguf.errors import HgError
from hybridgen_gguf.model_file.header import read_header

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256, which every type divides."""
    return tinygguf.build(tmp_path_factory.mktemp("wide") / "wide.gguf", embd=256, ff=256, tied=False)


def matrix_of(model: Path, **changes: object) -> Matrix:
    rng = np.random.default_rng(7)
    names = [t for t in read_header(model).tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    sums = {t.name: rng.uniform(0.1, 3.0, (1, t.shape[0])) for t in names}
    return replace(Matrix(sums, {name: np.full(1, 4.0) for name in sums}, 2, 32, "random"), **changes)


def old_form(values: Mapping[str, np.ndarray], calls: int = 4, tail: bytes = b"") -> bytes:
    """What llama-imatrix wrote before GGUF."""
    data = struct.pack("<i", len(values))
    for name, sums in values.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, sums.size)
        data += sums.astype("<f4").tobytes()
    return data + tail


def test_the_older_form_gives_the_same_file(wide: Path, tmp_path: Path, capsys: Capture) -> None:
    matrix = matrix_of(wide)
    write_imatrix(tmp_path / "i.gguf", matrix)
    end = struct.pack("<ii", 2, 6) + b"random"
    (tmp_path / "i.dat").write_bytes(old_form({n: v[0] for n, v in matrix.sums.items()}, tail=end))
    found = read_imatrix(tmp_path / "i.dat")
    assert (found.chunks, found.dataset) == (2, "random")
    assert read_summary(tmp_path / "i.dat").sizes == read_summary(tmp_path / "i.gguf").sizes
    for name, values in matrix.weights().items():
        assert np.array_equal(found.weights()[name], values)
    for kind in ("IQ2_XXS", "Q4_K_M"):
        tensors = []
        for form in ("gguf", "dat"):
            out = tmp_path / f"{form}.{kind}.gguf"
            assert call(capsys, "quantize", wide, out, kind, "--imatrix", tmp_path / f"i.{form}").code == 0
            header = read_header(out)
            tensors.append(out.read_bytes()[header.data_offset :])
        assert tensors[0] == tensors[1]


def test_the_older_form_of_experts(tmp_path: Path, capsys: Capture) -> None:
    model = tinygguf.build(tmp_path / "m.gguf", embd=256, ff=256, experts=4)
    shapes = {t.name: t.shape for t in read_header(model).tensors if t.name.startswith("blk.") and len(t.shape) > 1}
    values = {n: np.ones(s[0] * (s[2] if len(s) > 2 else 1)) for n, s in shapes.items()}
    (tmp_path / "i.dat").write_bytes(old_form(values))
    assert call(capsys, "quantize", model, tmp_path / "o.gguf", "IQ2_XS", "--imatrix", tmp_path / "i.dat").code == 0


ONE = {"blk.0.attn_q.weight": np.ones(8)}
HOSTILE = {
    "cut in a value": old_form(ONE)[:-3],
    "cut in a name": old_form(ONE)[:12],
    "more entries than bytes": struct.pack("<i", 60000) + old_form(ONE)[4:],
    "a length of 2 GiB": old_form(ONE)[:31] + struct.pack("<i", 0x7FFFFFFF) + b"x" * 40,
    "a negative length": old_form(ONE)[:31] + struct.pack("<i", -5) + b"x" * 40,
    "no values": old_form({"blk.0.attn_q.weight": np.ones(0)}),
    "NaN": old_form({"blk.0.attn_q.weight": np.full(8, np.nan)}),
    "negative": old_form({"blk.0.attn_q.weight": np.full(8, -1.0)}),
    "twice": struct.pack("<i", 2) + old_form(ONE)[4:] * 2,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_of_the_older_form(wide: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    (tmp_path / "i.dat").write_bytes(HOSTILE[name])
    done = call(capsys, "quantize", wide, tmp_path / "o.gguf", "Q4_K_M", "--imatrix", tmp_path / "i.dat")
    refused(done, 1, "i.dat", "256 columns" if name in ("NaN", "negative") else "damaged")
    with pytest.raises(HgError):
        read_imatrix(tmp_path / "i.dat")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i.dat"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 255))
def test_any_bytes_for_a_matrix(tmp_path_factory: pytest.TempPathFactory, tail: bytes, at: int, byte: int) -> None:
    data = bytearray(old_form({"blk.0.attn_q.weight": np.ones(8), "blk.1.attn_q.weight": np.ones(4)}, tail=tail))
    data[at % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "any.dat"
    path.write_bytes(data)
    for read in (read_summary, read_imatrix):
        try:
            read(path)
        except HgError as error:
            assert "any.dat" in error.what


def test_a_matrix_of_another_model(wide: Path, tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "o.gguf"
    write_imatrix(tmp_path / "i.gguf", matrix_of(tiny))
    done = call(capsys, "quantize", wide, out, "Q4_K_M", "--imatrix", tmp_path / "i.gguf")
    refused(done, 1, "i.gguf is of another model", "14 of 14 tensors", "64 values for 256 columns")
    values = {f"model.layers.0.{name}": np.ones((1, 8)) for name in "ab"}
    write_imatrix(tmp_path / "i.gguf", Matrix(values, {name: np.ones(1) for name in values}, 1, 32))
    done = call(capsys, "quantize", wide, out, "Q4_K_M", "--imatrix", tmp_path / "i.gguf", "--dry-run")
    refused(done, 1, "has nothing for any tensor of this model", "model.layers.0.a")
    # Names and sizes fit, but the digest that the matrix holds is another file's.
    write_imatrix(tmp_path / "i.gguf", matrix_of(wide, model_sha256="ab" * 32))
    done = call(capsys, "quantize", wide, out, "Q4_K_M", "--imatrix", tmp_path / "i.gguf")
    assert done.code == 0 and "was made from another file (sha256 abababab" in done.err
    own = hashlib.sha256(wide.read_bytes()).hexdigest()
    write_imatrix(tmp_path / "i.gguf", matrix_of(wide, model_sha256=own))
    done = call(capsys, "quantize", wide, out, "Q4_K_M", "--imatrix", tmp_path / "i.gguf")
    assert done.code == 0 and "warning" not in done.err


def test_all_missing_entries_are_counted_at_once(wide: Path, tmp_path: Path, capsys: Capture) -> None:
    whole = matrix_of(wide)
    kept = {name: values for name, values in whole.sums.items() if "ffn_" not in name}
    write_imatrix(tmp_path / "i.gguf", replace(whole, sums=kept, counts={n: whole.counts[n] for n in kept}))
    out, matrix = tmp_path / "o.gguf", tmp_path / "i.gguf"
    done = call(capsys, "quantize", wide, out, "IQ2_XXS", "--imatrix", matrix, "--pure")
    refused(done, 2, "i.gguf lacks 8 of the 16 tensors that IQ2_XXS needs it for", "and 4 more")
    assert not out.exists()
    assert call(capsys, "quantize", wide, out, "Q4_K_M", "--imatrix", matrix).code == 0


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (("IQ2_XXS",), "IQ2_XXS"),
        (("Q2_K_S",), "Q2_K_S"),
        (("Q4_K_M", "--tensor-type", "ffn_up=IQ1_M"), "IQ1_M"),
        (("Q4_K_M", "--tensor-type", "ffn_up=IQ3_XXS"), "IQ3_XXS"),
        (("Q4_K_M", "--token-embedding-type", "IQ2_XS"), "IQ2_XS"),
        (("Q4_K_M", "--output-tensor-type", "IQ1_S"), "IQ1_S"),
    ],
)
def test_the_type_that_needs_a_matrix_is_named(
    wide: Path, tmp_path: Path, capsys: Capture, flags: tuple[str, ...], kind: str
) -> None:
    done = call(capsys, "quantize", wide, tmp_path / "o.gguf", *flags)
    refused(done, 2, f"{kind} needs an importance matrix")
    assert "damaged" not in done.err and list(tmp_path.iterdir()) == []
