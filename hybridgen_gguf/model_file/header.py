"""GGUF header, read strictly: keys, tensor list, where the data lies. Knows no model and no tensor data.

Every length is checked against the bytes left in the file before anything is allocated, so that a lying header costs
neither memory nor time. Long arrays (a vocabulary) are skipped over and kept as views; `ArrayView.load` reads them.
What the engine would refuse is refused here with the field's name. Source: ggml's `gguf.h` and `gguf.cpp`, version 3.

Invariant: a `Header` that was returned describes tensors that all lie inside the file, in order, without overlap.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadFile
from ..printable import printable
from ..units import round_up
from .byte_reader import ByteReader, open_regular
from .foreign import name_foreign
from .types import GGML_TYPES

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "str", 10: "u64", 11: "i64",
    12: "f64",
}  # fmt: skip
_UNPACK = {code: struct.Struct("<" + char) for code, char in _SCALARS.items()}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
# Above these nothing real exists: the largest models have some 200 keys, 2,000 tensors, 1 M vocabulary strings.
_MOST_KEYS, _MOST_TENSORS, _MOST_STRINGS = 1 << 16, 1 << 18, 1 << 21
_LONGEST_SHOWN = 1 << 16
_LONGEST_KEY, _LONGEST_NAME, _MOST_TEXT = 65535, 63, 64 << 20
_FIXED = 24  # bytes before the first key
# A key needs 14 bytes, but counting its length field alone lets an absurd length be reported as such.
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8, 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array left in the file. `type`: of an element (`u32`, `str`, …); `offset`, `size`: its bytes in the file."""

    path: Path
    type: str
    count: int
    offset: int
    size: int

    def load(self, most: int | None = None) -> tuple[int | float | bool | str, ...]:
        """The first `most` elements (None: all); broken UTF-8 is replaced. Raises BadFile when the file has changed."""
        if self.type == "str":
            return tuple(item.decode("utf-8", errors="replace") for item in self.load_bytes(most))
        count = self._count(most)
        code = next(code for code, name in _TYPE_NAMES.items() if name == self.type)
        return struct.unpack(f"<{count}{_SCALARS[code]}", self._read(count * _UNPACK[code].size))

    def load_bytes(self, most: int | None = None) -> tuple[bytes, ...]:
        """The first `most` strings of a `str` array, undecoded; with `most` each is cut at 64 KiB."""
        if most is not None and most < self.count:
            return self._first_strings(most)
        raw, at, items = self._read(self.size), 0, []
        try:
            for _ in range(self.count):
                end = at + 8 + _U64.unpack_from(raw, at)[0]
                items.append(raw[at + 8 : end])
                at = end
        except (struct.error, OverflowError):
            at = -1
        if at != len(raw):
            raise BadFile(f"{printable(str(self.path))} changed while it was read")
        return tuple(items)

    def _first_strings(self, most: int) -> tuple[bytes, ...]:
        with open_regular(self.path) as file:
            source, items = ByteReader(self.path, file, os.fstat(file.fileno()).st_size), []
            source.pos = self.offset
            for _ in range(most):
                size = source.u64("a string")
                items.append(source.take(min(size, _LONGEST_SHOWN), "a string"))
                source.pos += max(size - _LONGEST_SHOWN, 0)
        return tuple(items)

    def _count(self, most: int | None) -> int:
        return self.count if most is None else min(most, self.count)

    def _read(self, size: int) -> bytes:
        with open_regular(self.path) as file:
            file.seek(self.offset)
            raw = file.read(size)
        if len(raw) != size:
            raise BadFile(f"{printable(str(self.path))} became shorter while it was read")
        return raw


Value = int | float | bool | str | ArrayView


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape`: ggml order, contiguous dimension first; `offset`: bytes from the header's `data_offset`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensor data. `data_offset`: where that data starts, bytes from the file's start."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_bytes: int
    alignment: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of the GGUF file at `path`. Raises NotFound, or BadFile with the field at fault."""
    path = Path(path)
    with open_regular(path) as file:
        return _HeaderReader(path, ByteReader(path, file, os.fstat(file.fileno()).st_size)).header()


class _HeaderReader:
    def __init__(self, path: Path, source: ByteReader) -> None:
        self._path, self._source, self._text_left = path, source, _MOST_TEXT

    def header(self) -> Header:
        src = self._source
        version, n_tensors, n_keys = self._start()
        metadata: dict[str, Value] = {}
        for index in range(n_keys):
            key = src.string(f"the name of key {index}", _LONGEST_KEY)
            if not key:
                raise src.bad(f"key {index} has no name")
            if key in metadata:
                raise src.bad(f"{_key(key)} appears twice")
            metadata[key] = self._value(_key(key))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 31 or alignment & (alignment - 1):
            raise src.bad("key 'general.alignment' is not a power of two")
        tensors = tuple(self._tensor(index) for index in range(n_tensors))
        data_offset = round_up(src.pos, alignment) if tensors else src.pos
        self._check_order(tensors, alignment, src.size - data_offset)
        self._check_end(tensors, data_offset)
        return Header(self._path, version, metadata, tensors, data_offset, src.size, alignment)

    def _start(self) -> tuple[int, int, int]:
        src = self._source
        if src.size == 0:
            raise src.bad("is empty (0 bytes)", "fetch the file again")
        head = src.peek(512)
        if head[:4] != MAGIC:
            if MAGIC.startswith(head):
                raise src.cut(f"only {src.size} bytes are present")
            what, hint = name_foreign(head)
            raise src.bad(f"is not a GGUF file: it is {what}", hint)
        if src.size < _FIXED:
            raise src.cut(f"the first {_FIXED} bytes are needed, {src.size} are present")
        version, n_tensors, n_keys = struct.unpack_from("<IQQ", head, 4)
        src.pos = _FIXED
        if version and version & 0xFFFF == 0:
            raise src.bad("is a big-endian GGUF file, which the engine does not read on this machine")
        if version == 1:
            raise src.bad("is GGUF version 1, which is no longer read", "convert the original model again")
        if version not in (2, 3):
            raise src.bad(f"says GGUF version {version}; versions 2 and 3 are known", "a newer hgguf may read it")
        fields = (
            ("n_kv", n_keys, _MOST_KEYS, _LEAST_KEY_BYTES),
            ("n_tensors", n_tensors, _MOST_TENSORS, _LEAST_TENSOR_BYTES),
        )
        for field, count, most, _ in fields:
            if count > most:
                raise src.bad(f"has an absurd header: {field} is {count:,}")
        for field, count, _, least in fields:
            if count * least > src.size - _FIXED:
                need = f"which needs at least {count * least:,} bytes; {src.size - _FIXED:,} follow"
                raise src.cut(f"{field} is {count:,}, {need}")
        return version, n_tensors, n_keys

    def _value(self, where: str) -> Value:
        src = self._source
        code = src.u32(where)
        if code in _UNPACK:
            value: Value = _UNPACK[code].unpack(src.take(_UNPACK[code].size, where))[0]
            return value
        if code == _STRING:
            start = src.pos
            text = src.string(f"the value of {where}", self._text_left)
            self._text_left -= src.pos - start - 8
            return text
        if code != _ARRAY:
            raise src.bad(f"{where} has the unknown type {code}")
        return self._array(where)

    def _array(self, where: str) -> ArrayView:
        src = self._source
        code, count = src.u32(where), src.u64(where)
        if code not in _UNPACK and code != _STRING:
            raise src.bad(f"{where} is an array of the unknown or nested type {code}")
        start, least = src.pos, 8 if code == _STRING else _UNPACK[code].size
        if count * least > src.size - start:
            raise src.over(f"{where}, an array of {count:,} elements,", count * least)
        if code != _STRING:
            src.pos += count * least
        elif count > _MOST_STRINGS:
            raise src.bad(f"{where} has the absurd length of {count:,} strings")
        else:
            src.skip_strings(count, where)
        return ArrayView(self._path, _TYPE_NAMES[code], count, start, src.pos - start)

    def _tensor(self, index: int) -> TensorInfo:
        src = self._source
        name = src.string(f"the name of tensor {index}", _LONGEST_NAME)
        where = _tensor(name)
        n_dims = src.u32(where)
        if n_dims > 4:
            raise src.bad(f"{where} has {n_dims:,} dimensions; at most 4 are known")
        shape = tuple(src.u64(where) for _ in range(n_dims))
        code, offset = src.u32(where), src.u64(where)
        kind = GGML_TYPES.get(code)
        if kind is None:
            raise src.bad(f"{where} has the unknown type {code}", "a newer hgguf may read it")
        elements = math.prod(shape)
        if max(shape, default=1) >= 1 << 63 or elements >= 1 << 63:
            raise src.bad(f"{where} has the absurd shape {list(shape)}")
        if 0 in shape:
            raise src.bad(f"{where} has the shape {list(shape)}, with a dimension of zero")
        row = shape[0] if shape else 1
        if row % kind.block:
            raise src.bad(f"{where} has rows of {row}, not a multiple of {kind.name}'s block of {kind.block}")
        return TensorInfo(name, shape, kind.name, offset, elements // kind.block * kind.bytes)

    def _check_order(self, tensors: tuple[TensorInfo, ...], alignment: int, size: int) -> None:
        seen: set[str] = set()
        end = 0
        for index, tensor in enumerate(tensors):
            if tensor.name in seen:
                raise self._source.bad(f"{_tensor(tensor.name)} appears twice")
            seen.add(tensor.name)
            if tensor.offset != end:
                raise self._source.bad(_misplaced(tensors, index, end, alignment, size))
            end = round_up(tensor.offset + tensor.bytes, alignment)

    def _check_end(self, tensors: tuple[TensorInfo, ...], data_offset: int) -> None:
        size = self._source.size
        first = next((t for t in tensors if data_offset + t.offset + t.bytes > size), None)
        if first is not None:
            expected = data_offset + tensors[-1].offset + tensors[-1].bytes
            raise self._source.cut(
                f"{_tensor(first.name)} runs past the end; "
                f"{expected:,} bytes expected, {size:,} present ({expected - size:,} missing)"
            )


def _misplaced(tensors: tuple[TensorInfo, ...], index: int, end: int, alignment: int, size: int) -> str:
    """Which tensor is at fault where tensor `index` does not start at `end`: that one, or the shape of the one before.

    The shape is, when the tensor's own offset and size lead to the next tensor, or to the end of the data (`size`).
    """
    tensor = tensors[index]
    own_end = round_up(tensor.offset + tensor.bytes, alignment)
    following = tensors[index + 1].offset if index + 1 < len(tensors) else round_up(size, alignment)
    room = tensor.offset - tensors[index - 1].offset if index else 0
    if room > 0 and not tensor.offset % alignment and following == own_end:
        before = tensors[index - 1]
        return (
            f"{_tensor(before.name)} has the shape {list(before.shape)} of {before.type}, which takes {before.bytes:,} "
            f"bytes, where there are {room:,}"
        )
    if tensor.offset % alignment:
        fault = f"starts at an offset that is not a multiple of {alignment}"
    else:
        fault = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
    return f"{_tensor(tensor.name)} {fault}: offset {tensor.offset:,}, expected {end:,}"


def _key(name: str) -> str:
    return f"key '{printable(name, limit=80)}'"


def _tensor(name: str) -> str:
    return f"tensor '{printable(name)}'"
