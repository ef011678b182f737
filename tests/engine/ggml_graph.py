"""A few ggml calls through ctypes, enough to compute attention operators on the CPU from numpy arrays.

Knows nothing of models or contexts. Invariant: every array given to `Graph.tensor` is copied, so callers keep theirs.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

P, N, L, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


def _declare(lib: ctypes.CDLL, name: str, result: object, *args: object) -> None:
    f = getattr(lib, name)
    f.restype, f.argtypes = result, list(args)


class Ggml:
    """The libraries of one build, with the calls used here declared."""

    def __init__(self, folder: Path) -> None:
        mode = os.RTLD_GLOBAL | os.RTLD_NOW
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=mode)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=mode)
        b = self.base
        _declare(b, "ggml_init", P, _InitParams)
        _declare(b, "ggml_free", None, P)
        _declare(b, "ggml_new_tensor_4d", P, P, N, L, L, L, L)
        _declare(b, "ggml_permute", P, P, P, N, N, N, N)
        _declare(b, "ggml_get_data", P, P)
        _declare(b, "ggml_nbytes", ctypes.c_size_t, P)
        _declare(b, "ggml_quantize_chunk", ctypes.c_size_t, N, P, P, L, L, L, P)
        _declare(b, "ggml_new_graph", P, P)
        _declare(b, "ggml_build_forward_expand", None, P, P)
        _declare(b, "ggml_flash_attn_ext", P, P, P, P, P, P, F, F, F)
        _declare(b, "ggml_hg_attn_part", P, P, P, P, P, P, P, F, F, F)
        _declare(b, "ggml_hg_attn_merge", P, P, P, P, L, L, L, L)
        _declare(self.cpu, "ggml_graph_compute_with_ctx", N, P, P, N)


class Graph:
    """One ggml context; use as `with Graph(ggml) as g:`."""

    def __init__(self, ggml: Ggml, mem_bytes: int = 512 << 20) -> None:
        self.g, self.b = ggml, ggml.base
        self.ctx = self.b.ggml_init(_InitParams(mem_bytes, None, False))

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.b.ggml_free(self.ctx)

    def tensor(self, a: NDArray[np.generic], kind: str = "f32") -> int:
        """A contiguous tensor; the array's last axis is the first of ggml. Types but f16, f32 by its quantizer."""
        shape = (1,) * (4 - a.ndim) + a.shape
        t = self.b.ggml_new_tensor_4d(self.ctx, TYPES[kind], *reversed(shape))
        dest = self.b.ggml_get_data(t)
        if kind in ("f32", "f16"):
            raw = np.ascontiguousarray(a, np.float32 if kind == "f32" else np.float16)
            ctypes.memmove(dest, raw.ctypes.data, raw.nbytes)
        else:
            raw = np.ascontiguousarray(a, np.float32)
            self.b.ggml_quantize_chunk(TYPES[kind], raw.ctypes.data, dest, 0, raw.size // shape[3], shape[3], None)
        return int(t)

    def heads_first(self, t: int) -> int:
        """[width, heads, cells, streams] seen as [width, cells, heads, streams], as attention takes it."""
        return int(self.b.ggml_permute(self.ctx, t, 0, 2, 1, 3))

    def compute(self, t: int, threads: int = 2) -> NDArray[np.float32]:
        """The tensor's values, flat."""
        gf = self.b.ggml_new_graph(self.ctx)
        self.b.ggml_build_forward_expand(gf, t)
        status = self.g.cpu.ggml_graph_compute_with_ctx(self.ctx, gf, threads)
        if status != 0:
            raise RuntimeError(f"graph compute gave status {status}")
        out = np.empty(self.b.ggml_nbytes(t) // 4, np.float32)
        ctypes.memmove(out.ctypes.data, self.b.ggml_get_data(t), out.nbytes)
        return out
