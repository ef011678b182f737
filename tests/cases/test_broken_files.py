"""Cut files, absurd headers, bad vocabularies, sets of parts: what validate, inspect and every opening say.

Cases D-01 to D-04.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.errors import BadFile, HgError, NotFound
from hybridgen_gguf.model_file.inspection import inspect_file
from hybridgen_gguf.model_file.shape import read_shape
from hybridgen_gguf.model_file.validation import validate_file, validate_files


def everyone_says(path: Path) -> str:
    """The one message that validate, inspect and the planner's reader agree on."""
    problems = validate_file(path).problems
    said = set(problems)
    for ask in (inspect_file, read_shape):
        with pytest.raises(HgError) as caught:
            ask(path)
        said.add(caught.value.what)
    assert len(said) == 1 and str(path) in problems[0]
    return problems[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tinygguf.build(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


@pytest.mark.parametrize("cut", [300_000, -1, 200_000])
def test_d01_data_that_ends_early(tmp_path: Path, tiny: bytes, cut: int) -> None:
    part = tiny[:cut]
    said = everyone_says(raw.write(tmp_path, part))
    assert "cut short" in said and "runs past the end" in said
    assert f"{len(tiny):,} bytes expected, {len(part):,} present" in said


def test_d01_the_first_tensor_past_the_end_is_named(tmp_path: Path, tiny: bytes) -> None:
    whole = raw.write(tmp_path, tiny, "whole.gguf")
    model = inspect_file(whole).file
    third = model.tensors[2]
    end = model.headers[0].data_offset + third.offset + third.bytes
    assert f"tensor '{third.name}' runs past the end" in everyone_says(raw.write(tmp_path, tiny[: end - 1]))
    assert f"tensor '{model.tensors[3].name}'" in everyone_says(raw.write(tmp_path, tiny[:end]))


@pytest.mark.parametrize("size", [24, 4, 1000])
def test_d01_header_that_ends_early(tmp_path: Path, tiny: bytes, size: int) -> None:
    assert "cut short" in everyone_says(raw.write(tmp_path, tiny[:size]))


def test_d01_nothing_at_all(tmp_path: Path) -> None:
    assert "is empty" in everyone_says(raw.write(tmp_path, b""))


def head(n_tensors: int, n_keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (head(0, 1, struct.pack("<Q", 0xFFFFFFFFFFFF)), "the name of key 0"),
        (head(0, 1 << 40, bytes(8)), "n_kv"),
        (head(1 << 40, 0, bytes(8)), "n_tensors"),
        (head(0, 1, raw.text("k") + struct.pack("<IQ", 8, 512 << 20) + bytes(1 << 20)), "the value of key 'k'"),
        (head(0, 1, raw.text("k") + struct.pack("<IIQ", 9, 8, 1 << 50) + bytes(1 << 20)), "key 'k'"),
        (head(0, 1, raw.text("k") + struct.pack("<IIQ", 9, 8, 9) + b"\xff" * (1 << 20)), "key 'k'"),
    ],
)
def test_d02_absurd_lengths(tmp_path: Path, data: bytes, field: str) -> None:
    path = raw.write(tmp_path, data)
    tracemalloc.start()
    said = everyone_says(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert field in said


def test_d03_two_pieces_with_one_text(tmp_path: Path) -> None:
    bad = tinygguf.build(tmp_path / "dup.gguf", tokens={100: "<0x41>"})
    good = tinygguf.build(tmp_path / "good.gguf")
    reports = validate_files([bad, good])
    assert [report.ok for report in reports] == [False, True]
    assert reports[0].problems == (f"{bad}: tokens 68 and 100 have the same text '<0x41>'",)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_d04_every_part_stands_for_the_whole(parts: list[Path], tmp_path: Path) -> None:
    single = read_shape(tinygguf.build(tmp_path / "single.gguf"))
    link = tmp_path / "link.gguf"
    link.symlink_to(parts[1])
    for path in (*parts, link):
        shape = read_shape(path)
        assert (shape.n_layers, shape.parameters, shape.bytes_weights) == (2, single.parameters, single.bytes_weights)
        assert shape.file.path.name == "m-00001-of-00003.gguf"
        assert validate_file(path).ok


def test_d04_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    assert "m-00002-of-00003.gguf" in validate_file(parts[0]).problems[0]
    with pytest.raises(NotFound, match="part 2 of 3"):
        read_shape(parts[2])


def test_d04_cut_part_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(BadFile, match=r"m-00003-of-00003\.gguf is cut short"):
        read_shape(parts[0])
