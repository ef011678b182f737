"""One attention operator of the engine over numpy arrays, on the CPU, without a model.

Builds graphs of GGML_OP_FLASH_ATTN_EXT nodes whose keys and values lie as in a KV cache, rows [head][element] of one
cell after the other, and computes them with a chosen number of threads. Knows no model, no timing and no reference.
Invariant: the arrays given are copied, so the engine never reads numpy's memory; closing frees everything.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...closing import Closing
from ...errors import EngineError, UsageError
from ...model_file.types import ggml_type, row_bytes
from ...settings import KV_TYPES
from ..abi import declare, ggml, hg
from ..library import check, find

Floats = NDArray[np.float32]
#: cache types that the fast kernels read; every other type goes to the stock code
ATTENTION_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0")
_SWITCH = b"cpu-attention"
_SLACK = 1 << 20  # bytes for tensor headers and alignment


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL, bool]:
    """ggml-base and ggml-cpu, through handles of our own, and whether ggml-cpu has the fast kernels."""
    folder = find()
    patched = check(folder)
    try:
        base, cpu = (_open(folder, name) for name in ("ggml-base", "ggml-cpu"))
    except OSError as error:
        raise EngineError(f"the engine's CPU library cannot be loaded: {error}", "run scripts/setup again") from None
    if not declare(base, ggml.GRAPHS) or not declare(cpu, ggml.CPU):
        raise EngineError("the engine lacks attention graphs", "run scripts/setup again")
    return base, cpu, patched and declare(base, hg.IDENTITY) and declare(cpu, hg.ATTENTION)


def _open(folder: Path, name: str) -> ctypes.CDLL:
    for file in folder.iterdir():
        if file.stem in (name, f"lib{name}"):
            return ctypes.CDLL(str(file))
    raise OSError(f"{folder} has no {name}")


def attention_isa() -> str:
    """The fast kernels' instruction set (`avx512-vnni`, `avx512`, `avx2`, `neon`, `portable`); `stock` without them."""
    _, cpu, fast = _libraries()
    return str(cpu.hg_attention_isa().decode()) if fast else "stock"


@contextmanager
def attention_switch() -> Iterator[Callable[[str], None]]:
    """A function that sets the path of the whole process, `fast` or `stock`; at the end the one before comes back."""
    base, _, fast = _libraries()
    if not fast:
        raise EngineError("this engine has only stock CPU attention", "run scripts/setup")
    before = base.hg_switch_get(_SWITCH)

    def set_path(path: str) -> None:
        if not base.hg_switch_set(_SWITCH, path.encode()):
            raise UsageError(f"'{path}' is no path of CPU attention", "say fast or stock")

    try:
        yield set_path
    finally:
        base.hg_switch_set(_SWITCH, before)


def read_bandwidth(threads: int, n_bytes: int = 512 << 20, repeats: int = 5) -> float:
    """Bytes a second that `threads` threads read from memory at best. Raises EngineError without our engine."""
    _, cpu, fast = _libraries()
    speed = float(cpu.hg_read_bandwidth(threads, n_bytes, repeats)) if fast else 0.0
    if speed <= 0:
        raise EngineError("the read bandwidth cannot be measured with this engine", "run scripts/setup")
    return speed


@dataclass(frozen=True)
class Attention:
    """The operator's numbers. `scale` 0 means 1/sqrt(head size)."""

    type_k: str = "f16"
    type_v: str = "f16"
    scale: float = 0.0
    max_bias: float = 0.0
    softcap: float = 0.0


class AttentionGraph(Closing):
    """`layers` attention nodes over copies of the same arrays. Use as a context manager.

    Shapes: q [streams, tokens, heads, size], k [streams, cells, kv heads, size], v [streams, cells, kv heads, value
    size], mask [1 or streams, 1 or heads, tokens, cells] (kept as F16), sinks [heads]. Raises UsageError for a type or
    size the cache cannot have, EngineError when memory runs out.
    """

    def __init__(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        mask: Floats | None = None,
        sinks: Floats | None = None,
        *,
        how: Attention | None = None,
        layers: int = 1,
    ) -> None:
        how = how or Attention()
        self._base, self._cpu, _ = _libraries()
        self._shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
        need = layers * (
            cache_bytes(how.type_k, k.size) + cache_bytes(how.type_v, v.size) + 4 * int(np.prod(self._shape))
        )
        need += 4 * q.size + (2 * mask.size if mask is not None else 0) + _SLACK + 4096 * layers
        self._context = self._base.ggml_init(ggml.InitParams(need, None, False))
        if not self._context:
            raise EngineError(f"no memory for {need} bytes of attention", "use fewer cells")
        self._backend = self._cpu.ggml_backend_cpu_init()
        scale = how.scale or float(q.shape[3]) ** -0.5
        queries = self._heads_first(self._tensor(q, "f32"))
        masks = None if mask is None else self._tensor(mask, "f16")
        sink_values = None if sinks is None else self._tensor(sinks.reshape(1, 1, 1, -1), "f32")
        self._graph = self._base.ggml_new_graph(self._context)
        self._outputs: list[int] = []
        self._kv: list[tuple[int, int]] = []
        for _ in range(layers):
            pair = self._layer(k, v, how)
            node = self._base.ggml_flash_attn_ext(
                self._context, queries, *map(self._heads_first, pair), masks, scale, how.max_bias, how.softcap
            )
            if sink_values is not None:
                self._base.ggml_flash_attn_ext_add_sinks(node, sink_values)
            self._base.ggml_build_forward_expand(self._graph, node)
            self._outputs.append(node)
            self._kv.append(pair)
        self._how, self._k_shape, self._v_shape = how, k.shape, v.shape

    def _layer(self, k: Floats, v: Floats, how: Attention) -> tuple[int, int]:
        if not self._kv:
            return self._tensor(k, how.type_k), self._tensor(v, how.type_v)
        copies = []
        for first, array, kind in ((self._kv[0][0], k, how.type_k), (self._kv[0][1], v, how.type_v)):
            copy = self._new(array.shape, kind)
            source, size = self._base.ggml_get_data(first), cache_bytes(kind, array.size)
            ctypes.memmove(self._base.ggml_get_data(copy), source, size)
            copies.append(copy)
        return copies[0], copies[1]

    def _new(self, shape: tuple[int, ...], kind: str) -> int:
        tensor = self._base.ggml_new_tensor_4d(self._context, KV_TYPES[kind], *reversed(shape))
        return int(tensor)

    def _tensor(self, array: Floats, kind: str) -> int:
        tensor = self._new(array.shape, kind)
        to = self._base.ggml_get_data(tensor)
        if kind == "f16":
            with np.errstate(over="ignore"):
                raw = np.ascontiguousarray(array, np.float16)
            ctypes.memmove(to, raw.ctypes.data, raw.nbytes)
            return tensor
        values = np.ascontiguousarray(array, np.float32)
        if kind == "f32":
            ctypes.memmove(to, values.ctypes.data, values.nbytes)
        elif kind == "bf16":
            self._base.ggml_fp32_to_bf16_row_ref(values.ctypes.data, to, values.size)
        else:
            width = array.shape[-1]
            self._base.ggml_quantize_chunk(KV_TYPES[kind], values.ctypes.data, to, 0, values.size // width, width, None)
        return tensor

    def _heads_first(self, tensor: int) -> int:
        return int(self._base.ggml_permute(self._context, tensor, 0, 2, 1, 3))

    def stored(self) -> tuple[Floats, Floats]:
        """Keys and values as the cache holds them after rounding to their types, [streams, cells, kv heads, size]."""
        keys, values = self._kv[0]
        return (
            self._read(keys, self._how.type_k, self._k_shape),
            self._read(values, self._how.type_v, self._v_shape),
        )

    def _read(self, tensor: int, kind: str, shape: tuple[int, ...]) -> Floats:
        size = cache_bytes(kind, int(np.prod(shape)))
        raw = np.frombuffer(ctypes.string_at(self._base.ggml_get_data(tensor), size), np.uint8)
        return _decode(raw, kind).reshape(shape)

    def compute(self, threads: int) -> None:
        """Computes every node once. Raises EngineError when the engine reports a failure."""
        self._cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        status = self._base.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise EngineError(f"the engine could not compute attention (status {status})")

    def output(self, layer: int = 0) -> Floats:
        """The result of one node, [streams, tokens, heads, value size]."""
        data = self._base.ggml_get_data(self._outputs[layer])
        raw = ctypes.string_at(data, 4 * int(np.prod(self._shape)))
        return np.frombuffer(raw, np.float32).reshape(self._shape)

    def close(self) -> None:
        if self._context:
            self._base.ggml_backend_free(self._backend)
            self._base.ggml_free(self._context)
            self._context = None


def cache_bytes(kind: str, elements: int) -> int:
    """Bytes of `elements` elements of a cache type. Raises UsageError for a type or number that blocks cannot hold."""
    if kind not in ATTENTION_TYPES:
        raise UsageError(f"attention over '{kind}' cannot be built", f"choose one of {', '.join(ATTENTION_TYPES)}")
    block = ggml_type(kind).block
    if elements % block:
        raise UsageError(f"{kind} holds blocks of {block}, not {elements} elements", "use a multiple of the block")
    return row_bytes(kind, elements)


def _decode(raw: NDArray[np.uint8], kind: str) -> Floats:
    """Bytes of a cache type → float32, exactly (ggml-common.h: block_q8_0, block_q4_0)."""
    if kind in ("f32", "f16"):
        return raw.view(np.float32 if kind == "f32" else np.float16).astype(np.float32)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, ggml_type(kind).bytes)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    if kind == "q8_0":
        return scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    nibbles = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    return scale * (nibbles.astype(np.float32) - 8)
