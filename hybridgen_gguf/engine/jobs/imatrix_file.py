"""Importance matrices on disk, in upstream's GGUF form; its older form (`.dat`) is read. Knows no engine.

A matrix holds for each weight tensor the sum of squared inputs of each column and how many inputs were summed. In the
older form a number of entries; of each its name, the chunks read, and the mean squares times the chunks; then, in most
files, the chunks of all and the text's name. All numbers are of 32 bits, names stand behind their length.
Source: tools/imatrix/imatrix.cpp (save_imatrix, save_imatrix_legacy) and common/imatrix-loader.cpp of the pinned
engine.
Invariant: `read_imatrix(write_imatrix(m)) == m` up to float32; a file from another tool needs upstream's keys only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BadFile
from ...model_file.byte_reader import ByteReader, open_regular
from ...model_file.header import MAGIC, ArrayView, Header, read_header
from ...printable import printable

_SUMS, _COUNTS = ".in_sum2", ".counts"
_TYPES = {"F32": "<f4", "F64": "<f8"}
_STATE_SHA256 = "hgguf.imatrix.state_sha256"
TEXT_SHA256, TOKENS, MODEL_SHA256 = "hgguf.imatrix.text_sha256", "hgguf.imatrix.tokens", "hgguf.imatrix.model_sha256"


@dataclass(frozen=True)
class Matrix:
    """`sums[name]`: float64 [experts, columns]; `counts[name]`: float64 [experts]. Text is empty when unknown."""

    sums: Mapping[str, NDArray[np.float64]]
    counts: Mapping[str, NDArray[np.float64]]
    chunks: int
    chunk_size: int
    dataset: str = ""
    text_sha256: str = ""
    tokens: int = 0
    model_sha256: str = ""

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Mean squared input of each column, float32 [experts * columns]; 1 for experts that no token visited."""
        found = {}
        for name, sums in self.sums.items():
            counts = self.counts[name].reshape(-1, 1)
            means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0)
            found[name] = means.astype(np.float32).ravel()
        return found


@dataclass(frozen=True)
class Summary:
    """What a matrix covers: `sizes[name]`: number of values; `model_sha256`: of the model, empty when unknown."""

    sizes: Mapping[str, int]
    model_sha256: str


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """What the matrix at `path` covers; its values are not read. Errors as `read_imatrix`."""
    if _is_old(Path(path)):
        return Summary({entry.name: entry.count for entry in _old_entries(Path(path))}, "")
    header = _matrix_header(path)
    sums = {t.name.removesuffix(_SUMS): t.parameters for t in header.tensors if t.name.endswith(_SUMS)}
    return Summary(sums, str(header.metadata.get(MODEL_SHA256, "")))


def _matrix_header(path: str | os.PathLike[str]) -> Header:
    header = read_header(path)
    kind = header.metadata.get("general.type", "imatrix")
    if kind != "imatrix" or not any(t.name.endswith(_SUMS) for t in header.tensors):
        raise BadFile(
            f"{printable(str(path))} is not an importance matrix", "make one with: hgguf imatrix MODEL -f TEXT -o FILE"
        )
    return header


def read_imatrix(path: str | os.PathLike[str]) -> Matrix:
    """The matrix in the file at `path`. Raises NotFound, or BadFile when it is another kind of file or damaged."""
    shown = printable(str(path))
    if _is_old(Path(path)):
        return _read_old(Path(path))
    header = _matrix_header(path)
    data = {}
    for tensor in header.tensors:
        if tensor.type not in _TYPES:
            raise BadFile(f"{shown}: {printable(tensor.name)} is {tensor.type}, expected F32")
        data[tensor.name] = _values(Path(path), header, tensor)
    names = sorted(name.removesuffix(_SUMS) for name in data if name.endswith(_SUMS))
    sums, counts = {}, {}
    for name in names:
        if name + _COUNTS not in data:
            raise BadFile(f"{shown} has sums but no counts for {printable(name)}")
        counts[name] = data[name + _COUNTS].ravel()
        sums[name] = data[name + _SUMS].reshape(-1, data[name + _SUMS].shape[-1])
        if len(sums[name]) != len(counts[name]) or not (_are_sums(sums[name]) and _are_sums(counts[name])):
            raise BadFile(
                f"{shown} is damaged: the values of {printable(name)} are negative, not finite or not as many as counts"
            )
    return Matrix(sums, counts, **_facts(header.metadata))


def _are_sums(values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).all() and (values >= 0).all())


# --- the older form ---

_MOST_OLD = 1 << 16  # entries; models have up to some 2,000 tensors
_LONGEST_OLD = 255  # bytes of a name; the engine's own have at most 63


@dataclass(frozen=True)
class _OldEntry:
    name: str
    calls: int
    count: int
    values: NDArray[np.float32]


def _is_old(path: Path) -> bool:
    """Whether the file begins as the older form does: a plausible number, and the name of a weight."""
    with open_regular(path) as file:
        head = file.read(8 + _LONGEST_OLD)
    entries, length = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
    name = head[8 : 8 + length]
    likely = 0 < entries <= _MOST_OLD and 0 < length <= _LONGEST_OLD and name.isascii()
    return not head.startswith(MAGIC) and likely and name.decode("ascii").isprintable() and b"." in name


def _old_entries(path: Path, rest: dict[str, Any] | None = None) -> Iterator[_OldEntry]:
    """The entries in their order; `rest` gets what stands behind them. No length is believed before it is checked."""
    with open_regular(path) as file:
        source = ByteReader(path, file, os.fstat(file.fileno()).st_size)
        total = source.u32("the number of entries")
        seen: set[str] = set()
        for index in range(total):
            where = f"entry {index + 1} of {total:,}"
            name = source.take(_bounded(source, f"the name of {where}", _LONGEST_OLD), where).decode("utf-8", "replace")
            calls = source.u32(where)
            count = _bounded(source, f"the values of {where} ({printable(name)})", source.size // 4)
            values = np.frombuffer(source.take(4 * count, where), "<f4")
            if name in seen:
                raise source.bad(f"is damaged: {printable(name)} appears twice")
            seen.add(name)
            yield _OldEntry(name, calls, count, values)
        if rest is not None and source.size - source.pos >= 8:
            rest["chunks"], length = source.u32("the end"), source.u32("the end")
            text = source.take(min(length, source.size - source.pos, _LONGEST_OLD), "the end")
            rest["dataset"] = text.decode("utf-8", "replace")


def _bounded(source: ByteReader, where: str, most: int) -> int:
    number = source.u32(where)
    if not 0 < number <= most:
        raise source.bad(f"is damaged: {where} claims a length of {number:,}")
    return number


def _read_old(path: Path) -> Matrix:
    rest: dict[str, Any] = {"chunks": 0, "dataset": ""}
    sums, counts = {}, {}
    for entry in _old_entries(path, rest):
        sums[entry.name] = entry.values.astype(np.float64).reshape(1, -1)
        counts[entry.name] = np.array([float(entry.calls or 1)])  # no calls: upstream takes the values as they are
        if not _are_sums(sums[entry.name]):
            raise BadFile(
                f"{printable(str(path))} is damaged: the values of {printable(entry.name)} are negative or not finite"
            )
    return Matrix(sums, counts, rest["chunks"], 0, rest["dataset"])


def read_state(path: Path) -> Matrix:
    """What `write_imatrix(exact=True)` wrote. Raises BadFile when a byte of it has changed since."""
    matrix = read_imatrix(path)
    if read_header(path).metadata.get(_STATE_SHA256) != _digest(matrix):
        raise BadFile(f"{printable(str(path))} is not what was saved")
    return matrix


def _digest(matrix: Matrix) -> str:
    facts = (matrix.chunks, matrix.chunk_size, matrix.tokens, matrix.text_sha256, matrix.model_sha256)
    digest = hashlib.sha256(repr(facts).encode())
    for name in sorted(matrix.sums):
        for values in (matrix.sums[name], matrix.counts[name]):
            digest.update(f"{name} {values.size} ".encode() + values.astype("<f8").tobytes())
    return digest.hexdigest()


def write_imatrix(path: Path, matrix: Matrix, exact: bool = False) -> None:
    """Writes `matrix` to `path`; `exact` keeps float64 and a digest, for going on later."""
    import gguf

    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", [matrix.dataset or "unnamed"])
    writer.add_uint32("imatrix.chunk_count", matrix.chunks)
    writer.add_uint32("imatrix.chunk_size", matrix.chunk_size)
    writer.add_string(TEXT_SHA256, matrix.text_sha256)
    writer.add_uint64(TOKENS, matrix.tokens)
    writer.add_string(MODEL_SHA256, matrix.model_sha256)
    if exact:
        writer.add_string(_STATE_SHA256, _digest(matrix))
    kind = np.float64 if exact else np.float32
    for name in sorted(matrix.sums):
        counts = matrix.counts[name]
        writer.add_tensor(name + _SUMS, np.ascontiguousarray(matrix.sums[name].reshape(len(counts), -1), dtype=kind))
        writer.add_tensor(name + _COUNTS, np.ascontiguousarray(counts.reshape(-1, 1), dtype=kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(path: Path, header: Header, tensor: Any) -> NDArray[np.float64]:
    with path.open("rb") as file:
        file.seek(header.data_offset + tensor.offset)
        raw = file.read(tensor.bytes)
    values: NDArray[Any] = np.frombuffer(raw, dtype=np.dtype(_TYPES[tensor.type]))
    return values.reshape(tuple(reversed(tensor.shape))).astype(np.float64)


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    datasets = metadata.get("imatrix.datasets")
    names = datasets.load() if isinstance(datasets, ArrayView) and datasets.type == "str" else ()
    return {
        "chunks": _whole(metadata.get("imatrix.chunk_count")),
        "chunk_size": _whole(metadata.get("imatrix.chunk_size")),
        "dataset": str(names[0]) if names else "",
        "text_sha256": str(metadata.get(TEXT_SHA256, "")),
        "tokens": _whole(metadata.get(TOKENS)),
        "model_sha256": str(metadata.get(MODEL_SHA256, "")),
    }


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
