"""What each number format costs each tensor: squared error of sampled rows, weighted by the inputs of each column.

For child processes. Knows tensors and formats, not models: how much an error in one tensor matters for the text is
measured elsewhere. Invariant: the engine's own quantizers are used, so the errors are those of the file to be written.
Source: ggml_quantize_chunk and ggml_get_type_traits in ggml/include/ggml.h of the pinned engine.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError
from ...model_file.header import Header, TensorInfo, read_header
from ...model_file.types import ggml_type, row_bytes
from ..handles import start
from .imatrix_file import read_imatrix

Send = Callable[[Mapping[str, Any]], None]
_MOST_ROWS = 256


def type_error_job(options: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """`{errors: {tensor: {type: error}}}` for `options["candidates"]`: tensor → types.

    An error is summed over all elements of the tensor (scaled up from a sample): squared difference times the column's
    mean squared input, or times 1 without `options["imatrix"]`.
    """
    start()
    importance = read_imatrix(options["imatrix"]).weights() if options["imatrix"] else {}
    headers = [read_header(path) for path in options["shards"]]
    places = {tensor.name: (header, tensor) for header in headers for tensor in header.tensors}
    wanted: Mapping[str, list[str]] = options["candidates"]
    errors: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(options["threads"]) as pool:
        jobs = {
            name: pool.submit(_errors, *places[name], kinds, importance.get(name)) for name, kinds in wanted.items()
        }
        for done, (name, job) in enumerate(jobs.items()):
            send({"done": done, "of": len(jobs)})
            errors[name] = job.result()
    return {"errors": errors}


def _errors(
    header: Header, tensor: TensorInfo, kinds: list[str], importance: NDArray[np.float32] | None
) -> dict[str, float]:
    columns = tensor.shape[0]
    rows = tensor.parameters // columns
    per_matrix = tensor.shape[1] if len(tensor.shape) > 1 else rows
    picked = np.unique(np.linspace(0, rows - 1, min(rows, _MOST_ROWS)).astype(np.int64))
    values = _read_rows(header, tensor, picked)
    weights = _row_weights(importance, picked // per_matrix, columns)
    scale = rows / len(picked)
    return {kind: scale * _error(kind, values, weights) for kind in kinds}


def _row_weights(
    importance: NDArray[np.float32] | None, matrices: NDArray[np.int64], columns: int
) -> NDArray[np.float32] | None:
    """The importance of each column for each picked row, float32 [rows, columns]; None when nothing is known."""
    if importance is None or importance.size % columns:
        return None
    table = importance.reshape(-1, columns)
    return table[np.minimum(matrices, len(table) - 1)]


def _read_rows(header: Header, tensor: TensorInfo, picked: NDArray[np.int64]) -> NDArray[np.float32]:
    columns = tensor.shape[0]
    size = row_bytes(tensor.type, columns)
    with Path(header.path).open("rb") as file:
        raw = bytearray()
        for row in picked:
            file.seek(header.data_offset + tensor.offset + int(row) * size)
            raw += file.read(size)
    if tensor.type == "F32":
        return np.frombuffer(bytes(raw), dtype=np.float32).reshape(len(picked), columns)
    return _to_float(tensor.type, bytes(raw), len(picked), columns)


def _to_float(kind: str, raw: bytes, rows: int, columns: int) -> NDArray[np.float32]:
    traits = start().base.ggml_get_type_traits(ggml_type(kind).id).contents
    if not traits.to_float:
        raise EngineError(f"the engine cannot read numbers of type {kind}")
    values = np.empty((rows, columns), dtype=np.float32)
    traits.to_float(
        ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p), rows * columns
    )
    return values


def _error(kind: str, values: NDArray[np.float32], weights: NDArray[np.float32] | None) -> float:
    rows, columns = values.shape
    size = row_bytes(kind, columns)
    out = ctypes.create_string_buffer(rows * size)
    quantize = start().base.ggml_quantize_chunk
    # One call a matrix would do, but rows of one matrix share their weights: equal neighbours go together.
    for first, end in _runs(weights, rows):
        importance = None if weights is None else np.ascontiguousarray(weights[first])
        part = np.ascontiguousarray(values[first:end])
        quantize(
            ggml_type(kind).id, part.ctypes.data, ctypes.byref(out, first * size), 0, end - first, columns,
            None if importance is None else importance.ctypes.data,
        )  # fmt: skip
    difference = (values - _to_float(kind, out.raw, rows, columns)).astype(np.float64) ** 2
    return float(difference.sum() if weights is None else (difference * weights).sum())


def _runs(weights: NDArray[np.float32] | None, rows: int) -> list[tuple[int, int]]:
    if weights is None:
        return [(0, rows)]
    borders = [0, *(i for i in range(1, rows) if not np.array_equal(weights[i], weights[i - 1])), rows]
    return list(itertools.pairwise(borders))
