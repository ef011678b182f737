"""Matrix products through the engine's ggml alone: random weights of any type, both values of the switch, and float64.

Knows ggml's C calls and nothing of the project's modules. Invariant: `product` leaves the switch as it found it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

P, N, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
Floats = NDArray[np.float32]
#: ggml's number of each type, and the elements of its block
TYPES = {
    "f32": (0, 1), "f16": (1, 1), "bf16": (30, 1), "q4_0": (2, 32), "q4_1": (3, 32), "q5_0": (6, 32), "q5_1": (7, 32),
    "q8_0": (8, 32), "iq4_nl": (20, 32), "mxfp4": (39, 32), "q2_k": (10, 256), "q3_k": (11, 256), "q4_k": (12, 256),
    "q5_k": (13, 256), "q6_k": (14, 256), "iq4_xs": (23, 256), "tq2_0": (35, 256),
}  # fmt: skip


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The libraries of one build."""

    def __init__(self, folder: Path) -> None:
        mode = os.RTLD_GLOBAL | os.RTLD_NOW
        self.base = base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=mode)
        self.cpu = cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=mode)
        calls = {
            "ggml_init": (P, _InitParams), "ggml_free": (None, P), "ggml_new_tensor_4d": (P, P, N, L, L, L, L),
            "ggml_get_data": (P, P), "ggml_nbytes": (ctypes.c_size_t, P), "ggml_new_graph": (P, P),
            "ggml_quantize_chunk": (ctypes.c_size_t, N, P, P, L, L, L, P), "ggml_mul_mat": (P, P, P, P),
            "ggml_mul_mat_id": (P, P, P, P, P), "ggml_build_forward_expand": (None, P, P),
            "hg_switch_set": (ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p),
            "hg_switch_get": (ctypes.c_char_p, ctypes.c_char_p),
        }  # fmt: skip
        for name, (result, *args) in calls.items():
            function = getattr(base, name)
            function.restype, function.argtypes = result, args
        cpu.ggml_graph_compute_with_ctx.argtypes = [P, P, N]
        cpu.hg_matrix_isa.restype = ctypes.c_char_p
        cpu.ggml_cpu_init()

    def quantize(self, kind: str, values: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """The bytes of `values` in a type, and what these bytes say as float64."""
        number, _ = TYPES[kind]
        flat = np.ascontiguousarray(values, np.float32)
        with Context(self, flat.nbytes * 3 + (1 << 20)) as c:
            width, rows = flat.shape[-1], flat.size // flat.shape[-1]
            t = self.base.ggml_new_tensor_4d(c.ctx, number, width, rows, 1, 1)
            data, size = self.base.ggml_get_data(t), self.base.ggml_nbytes(t)
            self.base.ggml_quantize_chunk(number, flat.ctypes.data, data, 0, rows, width, None)
            raw = np.frombuffer(ctypes.string_at(data, size), np.uint8).copy()
        return raw, self._values(number, raw, flat.size).reshape(flat.shape)

    def _values(self, number: int, raw: NDArray[np.uint8], count: int) -> NDArray[np.float64]:
        out = np.empty(count, np.float32)
        if number == 0:
            return raw.view(np.float32).astype(np.float64)
        if number == 1:
            return raw.view(np.float16).astype(np.float64)
        if number == 30:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        names = {v[0]: k for k, v in TYPES.items()}
        name = names[number].replace("_k", "_K")
        function = getattr(self.base, f"dequantize_row_{name}")
        function.restype, function.argtypes = None, [P, P, L]
        function(raw.ctypes.data, out.ctypes.data, count)
        return out.astype(np.float64)

    def product(
        self, kind: str, raw: NDArray[np.uint8], shape: Sequence[int], x: Floats, *, threads: int = 1,
        ids: NDArray[np.int32] | None = None, switch: str = "fast",
    ) -> Floats:  # fmt: skip
        """`x` [..., rows, k] times weights of `shape` [..., n, k]; `ids` [tokens, used]: x is [tokens, slots, k]."""
        before = self.base.hg_switch_get(b"cpu-matrix")
        self.base.hg_switch_set(b"cpu-matrix", switch.encode())
        try:
            with Context(self, raw.nbytes + 64 * x.nbytes + (256 << 20)) as c:
                sizes = reversed((1,) * (4 - len(shape)) + tuple(shape))
                w = self.base.ggml_new_tensor_4d(c.ctx, TYPES[kind][0], *sizes)
                ctypes.memmove(self.base.ggml_get_data(w), raw.ctypes.data, raw.nbytes)
                t = c.tensor(x, 0)
                if ids is None:
                    out = self.base.ggml_mul_mat(c.ctx, w, t)
                else:
                    out = self.base.ggml_mul_mat_id(c.ctx, w, t, c.tensor(ids, 26))
                return c.compute(out, threads)
        finally:
            self.base.hg_switch_set(b"cpu-matrix", before)


class Context:
    """Memory for one graph."""

    def __init__(self, ggml: Ggml, size: int) -> None:
        self.ggml, self.ctx = ggml, ggml.base.ggml_init(_InitParams(size, None, False))

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ggml.base.ggml_free(self.ctx)

    def tensor(self, a: NDArray[np.generic], number: int) -> int:
        t = self.ggml.base.ggml_new_tensor_4d(self.ctx, number, *reversed((1,) * (4 - a.ndim) + a.shape))
        a = np.ascontiguousarray(a)
        ctypes.memmove(self.ggml.base.ggml_get_data(t), a.ctypes.data, a.nbytes)
        return int(t)

    def compute(self, t: int, threads: int) -> Floats:
        base = self.ggml.base
        graph = base.ggml_new_graph(self.ctx)
        base.ggml_build_forward_expand(graph, t)
        if self.ggml.cpu.ggml_graph_compute_with_ctx(self.ctx, graph, threads) != 0:
            raise RuntimeError("the graph was not computed")
        out = np.empty(base.ggml_nbytes(t) // 4, np.float32)
        ctypes.memmove(out.ctypes.data, base.ggml_get_data(t), out.nbytes)
        return out


def engine_folder() -> Path:
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(sys.prefix) / "hgguf-engine")
