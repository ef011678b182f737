"""Importance matrices on disk, in upstream's GGUF form. Knows numbers and names, no engine.

A matrix holds for each weight tensor the sum of squared inputs of each column and how many inputs were summed.
Source: tools/imatrix/imatrix.cpp (save_imatrix) and common/imatrix-loader.cpp of the pinned engine.
Invariant: `read_imatrix(write_imatrix(m)) == m` up to float32; a file from another tool needs upstream's keys only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BadFile
from ...model_file.header import ArrayView, Header, read_header
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


def read_imatrix(path: str | os.PathLike[str]) -> Matrix:
    """The matrix in the file at `path`. Raises NotFound, or BadFile when it is another kind of file or damaged."""
    header = read_header(path)
    shown = printable(str(path))
    kind = header.metadata.get("general.type", "imatrix")
    if kind != "imatrix" or not any(t.name.endswith(_SUMS) for t in header.tensors):
        raise BadFile(f"{shown} is not an importance matrix", "make one with: hgguf imatrix MODEL -f TEXT -o FILE")
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
        finite = np.isfinite(sums[name]).all() and np.isfinite(counts[name]).all()
        if len(sums[name]) != len(counts[name]) or not finite:
            raise BadFile(
                f"{shown} is damaged: the values of {printable(name)} are not finite or not as many as counts"
            )
    return Matrix(sums, counts, **_facts(header.metadata))


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
