"""Quantizing eight blocks at a time (patch 0016) writes the bytes of the unpatched engine.

DIGESTS were made by a build of the unpatched sources. HGGUF_STOCK_ENGINE=DIR pytest tests/equality -k lanes
compares with such a build directly.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridgen_gguf.engine.library import Library, find

TYPES = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23}  # ggml_type
ROWS, COLS = 64, 512
# Of the bytes without and with an importance matrix.
DIGESTS = {
    "Q2_K": ["a9db199664543b21", "641888cf40bf1767"],
    "Q3_K": ["215a55df8f17d842", "ae53acbd34634761"],
    "Q4_K": ["17d87457805293ff", "a1b06b0ddfa0b350"],
    "Q5_K": ["d357e1ef4a865d47", "a160cadac8328248"],
    "Q6_K": ["f08e3be4bca083de", "def732a68eb5b750"],
    "IQ4_XS": ["d8577b41adc50e22", "6722cd03ede02aa2"],
}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the engine quantizes eight blocks at a time on x86-64 only"
)


def numbers(count: int, seed: int) -> NDArray[np.float32]:
    """Numbers between -1 and 1 that are the same with every version of NumPy."""
    state = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(31)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    return ((state >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(np.float32)


def rows() -> NDArray[np.float32]:
    """Spread as weights are, and what searches stumble over: zeros, one sign, flat blocks, few values, extremes."""
    x = numbers(ROWS * COLS, 1).reshape(ROWS, COLS) ** 3
    x[1] = 0
    x[2] = np.abs(x[2])
    x[3] = -np.abs(x[3])
    x[4, :64] = 0.5
    x[5] = np.round(x[5] * 4) / 4
    x[6] *= np.float32(1e-30)
    x[7] *= np.float32(1e30)
    x[8, ::9] = 0
    x[9, 1::2] = 0
    x[10, ::50] *= np.float32(64)
    return np.ascontiguousarray(x)


def quantized(engine: Path, x: NDArray[np.float32]) -> Iterator[tuple[str, bytes]]:
    """(type, bytes) for every type without and with an importance matrix, by the functions in this build's library."""
    library = ctypes.CDLL(str(engine / "libggml-base.so"))
    library.ggml_row_size.restype = library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_row_size.argtypes = [ctypes.c_int, count]
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    importance = numbers(COLS, 2) ** 2 + np.float32(1e-3)
    importance[7] = 0
    for name, number in TYPES.items():
        out = np.zeros(len(x) * library.ggml_row_size(number, COLS), np.uint8)
        for matrix in (None, importance.ctypes.data):
            library.ggml_quantize_chunk(number, x.ctypes.data, out.ctypes.data, 0, len(x), COLS, matrix)
            yield name, out.tobytes()


def digests(engine: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, written in quantized(engine, rows()):
        found.setdefault(name, []).append(hashlib.sha256(written).hexdigest()[:16])
    return found


@pytest.mark.parametrize("path", ["fast", "stock"])
def test_bytes_are_those_of_the_unpatched_engine(engine: Library, path: str) -> None:
    engine.set_switch("quantize", path)
    try:
        assert digests(find()) == DIGESTS
    finally:
        engine.set_switch("quantize", "fast")


@pytest.mark.skipif(
    not os.environ.get("HGGUF_STOCK_ENGINE"),
    reason="HGGUF_STOCK_ENGINE is not set: it names a folder with the unpatched engine, a build of its own",
)
def test_bytes_beside_an_unpatched_build(engine: Library) -> None:
    stock = Path(os.environ["HGGUF_STOCK_ENGINE"])
    assert digests(stock) == DIGESTS
    for seed in range(3, 11):
        exponents = numbers(ROWS, seed) * np.float32(60)
        x = numbers(ROWS * COLS, seed).reshape(ROWS, COLS) * np.exp2(np.round(exponents))[:, None].astype(np.float32)
        assert list(quantized(find(), x)) == list(quantized(stock, x))
