"""gguf_file.py: what is read, and every lie that is refused."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.errors import BadFile, HgError, NotFound
from hybridgen_gguf.model_file.header import ArrayView, read_header


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(BadFile) as caught:
        read_header(raw.write(folder, data))
    assert "\n" not in caught.value.what
    return caught.value.what


def test_agrees_with_gguf_py(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "tiny.gguf", sets=["x.signed=i32:-5", "x.big=u64:9000000000", "x.flag=bool:true"])
    header, other = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, list(t.shape), t.bytes) for t in header.tensors] == [
        (t.name, [int(n) for n in t.shape], int(t.n_bytes)) for t in other.tensors
    ]
    assert [header.data_offset + t.offset for t in header.tensors] == [t.data_offset for t in other.tensors]
    for name, field in other.fields.items():
        if not name.startswith("GGUF."):
            value = header.metadata[name]
            assert (list(value.load()) if isinstance(value, ArrayView) else value) == field.contents()


def test_array_views_load_whole_and_in_part(tmp_path: Path) -> None:
    keys = [raw.array("s", "str", ["a", "漢", b"\xff"]), raw.array("n", "i32", [1, -2, 3]), raw.array("e", "str", [])]
    header = read_header(raw.write(tmp_path, raw.gguf_bytes(keys)))
    strings, numbers, empty = header.metadata["s"], header.metadata["n"], header.metadata["e"]
    assert isinstance(strings, ArrayView) and isinstance(numbers, ArrayView) and isinstance(empty, ArrayView)
    assert strings.load() == ("a", "漢", "�")
    assert strings.load_bytes() == (b"a", "漢".encode(), b"\xff")
    assert strings.load(1) == ("a",)
    assert numbers.load() == (1, -2, 3)
    assert numbers.load(2) == (1, -2)
    assert empty.load() == ()


def test_array_view_of_a_file_that_shrank(tmp_path: Path) -> None:
    path = raw.write(tmp_path, raw.gguf_bytes([raw.array("s", "str", ["abc"] * 9), raw.array("n", "u32", [1] * 9)]))
    header = read_header(path)
    os.truncate(path, 60)
    for view in header.metadata.values():
        assert isinstance(view, ArrayView)
        with pytest.raises(BadFile, match="shorter"):
            view.load()


def test_strings_longer_than_the_window(tmp_path: Path) -> None:
    pieces = ["x" * 1_500_000, "y", "z" * 2_000_000, "w"]
    keys = [raw.array("s", "str", pieces), raw.key("after", "u32", 7)]
    header = read_header(raw.write(tmp_path, raw.gguf_bytes(keys)))
    view = header.metadata["s"]
    assert isinstance(view, ArrayView) and view.load() == tuple(pieces)
    assert [len(str(item)) for item in view.load(3)] == [65536, 1, 65536]
    assert header.metadata["after"] == 7


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "empty"),
        (b"G", "cut short"),
        (b"GGUF", "cut short"),
        (b"hello world\nsecond line", "text file that starts with 'hello world'"),
        (b"\x1b[31mred\x1b[0m is a nice colour", r"\\x1b"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
        (b"PK\x03\x04\x14\x00", "zip archive"),
        (b"\x80\x02}q\x00", "pickle"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "safetensors"),
        (b"tjgg\x03\x00\x00\x00", "before GGUF"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (bytes(4096), "never finished"),
        (b"\xde\xad\xbe\xef" * 9, "de ad be ef"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 77, 0, 0), "version 77"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, head: bytes, words: str) -> None:
    with pytest.raises(BadFile, match=words) as caught:
        read_header(raw.write(tmp_path, head))
    assert "\x1b" not in caught.value.what


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("none", NotFound), ("dangling", NotFound), ("a\0b", NotFound), ("x" * 300, NotFound)):
        with pytest.raises(kind):
            read_header(tmp_path / name)
    for name in ("pipe", ""):
        with pytest.raises(BadFile):
            read_header(tmp_path / name)
    with pytest.raises(NotFound):
        read_header(raw.write(tmp_path, b"x", "file") / "below")


def test_a_directory_gets_a_hint_at_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(BadFile) as caught:
        read_header(tmp_path)
    assert "m.gguf" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (raw.gguf_bytes([raw.key("k", "u32", 1), raw.key("k", "u32", 1)]), "key 'k' appears twice"),
        (raw.gguf_bytes([raw.key("", "u32", 1)]), "no name"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<I", 99)]), "unknown type 99"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<IIQ", 9, 9, 1)]), "nested type 9"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<IIQ", 9, 4, 1 << 60)]), "1,152,921,504,606,846,976 elements"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<IIQ", 9, 8, 1 << 61)]), "elements"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<IIQQ", 9, 8, 2, (1 << 64) - 1) + bytes(40)]), "runs past"),
        (raw.gguf_bytes([raw.text("k") + struct.pack("<IQ", 8, 1 << 63)]), "value of key 'k'"),
        (raw.gguf_bytes([raw.key("k\x1b[2J", "u32", 1)] * 2), r"k\\x1b\[2J"),
        (raw.gguf_bytes([], n_keys=1 << 40), "n_kv is 1,099,511,627,776"),
        (raw.gguf_bytes([], n_tensors=1 << 40), "n_tensors is 1,099,511,627,776"),
        (raw.gguf_bytes([], n_keys=60000), "n_kv is 60,000"),
        (raw.gguf_bytes([raw.key("general.alignment", "u32", 48)]), "power of two"),
        (raw.gguf_bytes([raw.key("general.alignment", "u32", 0)]), "power of two"),
        (raw.gguf_bytes([raw.key("general.alignment", "str", "32")]), "power of two"),
        (raw.gguf_bytes([], [raw.tensor("t", [1] * 5, 0)]), "5 dimensions"),
        (raw.gguf_bytes([], [raw.tensor("t", [4], 0, code=31)]), "unknown type 31"),
        (raw.gguf_bytes([], [raw.tensor("t", [1 << 40, 1 << 40], 0)]), "absurd shape"),
        (raw.gguf_bytes([], [raw.tensor("t", [(1 << 64) - 1], 0)]), "absurd shape"),
        (raw.gguf_bytes([], [raw.tensor("t", [33], 0, code=8)], 999), "block of 32"),
        (raw.gguf_bytes([], [raw.tensor("t", [8], 0), raw.tensor("t", [8], 32)], 64), "'t' appears twice"),
        (raw.gguf_bytes([], [raw.tensor("a", [8], 0), raw.tensor("b", [8], 0)], 64), "'b' overlaps"),
        (raw.gguf_bytes([], [raw.tensor("a", [8], 0), raw.tensor("b", [8], 64)], 128), "'b' leaves a hole"),
        (raw.gguf_bytes([], [raw.tensor("a", [8], 4)], 64), "multiple of 32"),
        (raw.gguf_bytes([], [raw.tensor("x" * 64, [8], 0)], 64), "absurd length of 64"),
        (raw.gguf_bytes([], [raw.tensor("a", [8], 0), raw.tensor("b", [8], 32)], 48), "'b' runs past the end"),
    ],
)
def test_lies_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = raw.write(tmp_path, data)
    with pytest.raises(BadFile, match=words):
        read_header(path)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    entries, data = raw.tensors({"a": [8], "b": [4, 4]})
    whole = raw.gguf_bytes([raw.key("k", "str", "text"), raw.array("v", "str", ["p", "qq"])], entries, data)
    read_header(raw.write(tmp_path, whole))
    for size in range(len(whole)):
        assert "cut short" in refused(tmp_path, whole[:size]) or size == 0


def test_a_lying_length_costs_no_memory(tmp_path: Path) -> None:
    lie = raw.text("k") + struct.pack("<IQ", 8, 512 << 20) + bytes(1 << 20)
    path = raw.write(tmp_path, raw.gguf_bytes([lie]))
    tracemalloc.start()
    with pytest.raises(BadFile, match="536,870,912 bytes"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_large_vocabulary_is_not_kept(tmp_path: Path) -> None:
    keys = [raw.array("tokenizer.ggml.tokens", "str", [f"piece{i}" for i in range(200_000)])]
    path = raw.write(tmp_path, raw.gguf_bytes(keys))
    tracemalloc.start()
    header = read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    view = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(view, ArrayView) and view.count == 200_000 and view.load(1) == ("piece0",)


def test_error_kinds_and_exit_codes(tmp_path: Path) -> None:
    for path, code in ((tmp_path / "none.gguf", 4), (raw.write(tmp_path, b"nothing"), 1)):
        with pytest.raises(HgError) as caught:
            read_header(path)
        assert caught.value.exit_code == code
