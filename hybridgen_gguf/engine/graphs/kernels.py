"""Small graphs of the engine's own kernels on any of its devices, and plain copies to and from them, to be timed.

Knows no clock, no model and no policy: it builds what is asked for, and running it is one call. On the CPU everything
holds quantized normal numbers: stock kernels look the scales of blocks up in a table of 256 KB, and with one scale for
all of them they are a quarter faster than in any model. Elsewhere everything holds one harmless byte.
Invariant: what a `Kernels` allocates is freed when it is closed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...closing import Closing
from ...errors import EngineError
from ...model_file.types import ggml_type, row_bytes
from .. import abi
from ..handles import start

_FILL = 0x11  # as half, bfloat, float or quantized scale: a small normal number
_NODES = 4096  # most nodes of one graph
_SAMPLE = 1 << 18  # numbers that are quantized once and then repeated: some thousand different scales
_SAMPLE_ROW = 1024


class _InitParams(ctypes.Structure):
    """struct ggml_init_params (ggml.h)."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# fmt: off
_BASE: dict[str, tuple[object, tuple[object, ...]]] = {
    # struct ggml_context * ggml_init(struct ggml_init_params params);
    "ggml_init": (c_void_p, (_InitParams,)),
    # void ggml_free(struct ggml_context * ctx);
    "ggml_free": (None, (c_void_p,)),
    # size_t ggml_tensor_overhead(void);
    "ggml_tensor_overhead": (c_size_t, ()),
    # size_t ggml_graph_overhead_custom(size_t size, bool grads);
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    # struct ggml_tensor * ggml_new_tensor_4d(ctx, enum ggml_type type, int64_t ne0, ne1, ne2, ne3);
    "ggml_new_tensor_4d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)),
    # struct ggml_tensor * ggml_permute(ctx, struct ggml_tensor * a, int axis0, axis1, axis2, axis3);
    "ggml_permute": (c_void_p, (c_void_p, c_void_p, c_int, c_int, c_int, c_int)),
    # struct ggml_tensor * ggml_mul_mat(ctx, struct ggml_tensor * a, struct ggml_tensor * b);
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    # struct ggml_tensor * ggml_add(ctx, struct ggml_tensor * a, struct ggml_tensor * b);
    "ggml_add": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    # struct ggml_tensor * ggml_flash_attn_ext(ctx, q, k, v, mask, float scale, float max_bias, float logit_softcap);
    "ggml_flash_attn_ext": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_float)),
    # struct ggml_cgraph * ggml_new_graph_custom(ctx, size_t size, bool grads);
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    # void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    # ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
    "ggml_backend_dev_init": (c_void_p, (c_void_p, c_char_p)),
    # void ggml_backend_free(ggml_backend_t backend);
    "ggml_backend_free": (None, (c_void_p,)),
    # enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph);
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    # ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    # void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    # bool ggml_backend_dev_supports_op(ggml_backend_dev_t device, const struct ggml_tensor * op);
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    # ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t device);
    "ggml_backend_dev_host_buffer_type": (c_void_p, (c_void_p,)),
    # ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
    # void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    # void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
    "ggml_backend_buffer_clear": (None, (c_void_p, c_uint8)),
    # void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    # ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_buffer_type_t buft);
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    # size_t ggml_quantize_chunk(type, const float * src, void * dst, start, nrows, n_per_row, const float * imatrix);
    "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    # void * ggml_get_data(const struct ggml_tensor * tensor);
    "ggml_get_data": (c_void_p, (c_void_p,)),
    # size_t ggml_nbytes(const struct ggml_tensor * tensor);
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    # void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    # void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}
# fmt: on
_SET_THREADS = ctypes.CFUNCTYPE(None, c_void_p, c_int)  # ggml_backend_set_n_threads_t
_EXTRA_TYPES = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)  # ggml_backend_dev_get_extra_bufts_t


@functools.cache
def _base() -> ctypes.CDLL:
    """ggml-base through a handle of our own, so that its declarations are ours."""
    base = ctypes.CDLL(start().base._name)
    if not abi.declare(base, _BASE):
        raise EngineError("the engine lacks functions that a profile needs", "run scripts/setup again")
    return base


@functools.cache
def _sample(kind: str) -> bytes:
    """Normal numbers in rows of different size, as trained weights are, in a number format of the engine."""
    random = np.random.default_rng(1)
    rows = _SAMPLE // _SAMPLE_ROW
    sizes = np.exp(random.normal(-4.0, 0.12, (rows, 1)))
    values = np.ascontiguousarray(random.normal(0, 1, (rows, _SAMPLE_ROW)) * sizes, np.float32)
    stored = ctypes.create_string_buffer(rows * row_bytes(kind, _SAMPLE_ROW))
    _base().ggml_quantize_chunk(
        ggml_type(kind).id, values.ctypes.data, ctypes.addressof(stored), 0, rows, _SAMPLE_ROW, None
    )
    return stored.raw


@dataclass(frozen=True)
class Matrices:
    """`copies` products of a `rows` x `cols` matrix of `type` with `tokens` columns."""

    type: str
    rows: int
    cols: int
    tokens: int
    copies: int

    @property
    def bytes(self) -> int:
        """Bytes of weights read by one run."""
        return self.copies * self.rows * row_bytes(self.type, self.cols)

    @property
    def flops(self) -> int:
        return 2 * self.copies * self.rows * self.cols * self.tokens


@dataclass(frozen=True)
class Attention:
    """`copies` attention nodes: `tokens` queries of `heads` heads over `cells` cells of `kv_heads` heads of `size`."""

    type: str
    cells: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    copies: int

    @property
    def bytes(self) -> int:
        """Bytes of K and V read by one run."""
        return self.copies * 2 * self.cells * row_bytes(self.type, self.kv_heads * self.size)

    @property
    def flops(self) -> int:
        return 4 * self.copies * self.cells * self.tokens * self.heads * self.size


class Kernels(Closing):
    """A device of the engine ("CPU", "CUDA0", "RPC0") and graphs on it. Raises EngineError for an unknown device."""

    def __init__(self, device: str = "CPU") -> None:
        library = start()
        self._base = _base()
        self._is_cpu = device == "CPU"
        self._device = library.ggml.ggml_backend_dev_by_name(device.encode())
        self._backend = self._base.ggml_backend_dev_init(self._device, None) if self._device else None
        if not self._backend:
            raise EngineError(f"the device {device} cannot be used", "see `hgguf engine` for the devices")
        self._registry = self._base.ggml_backend_dev_backend_reg(self._device)
        self._buffer_type = library.base.ggml_backend_dev_buffer_type(self._device)
        self._undo: list[Callable[[], None]] = [lambda: self._base.ggml_backend_free(self._backend)]

    def set_threads(self, threads: int) -> None:
        """For the CPU; other devices have no such setting."""
        function = self._base.ggml_backend_reg_get_proc_address(self._registry, b"ggml_backend_set_n_threads")
        if function:
            _SET_THREADS(function)(self._backend, threads)

    def graph(self, work: Matrices | Attention | int, kept: bool = False) -> Callable[[], None] | None:
        """What runs `work` once and waits for it; a number means that many tiny nodes in a row. None: not supported.

        Buffers are freed with the next call of `graph`, or, when `kept`, with the device.
        """
        scratch = _Scratch(self._base, self._device)
        try:
            if isinstance(work, Matrices):
                last = self._matrices(scratch, work)
            elif isinstance(work, Attention):
                last = self._attention(scratch, work)
            else:
                last = self._chain(scratch, work)
        except MemoryError:
            last = None
        if last is None:
            scratch.free()
            return None
        self._release(kept)
        self._undo.append(scratch.free)
        graph = scratch.graph()

        def run() -> None:
            status = self._base.ggml_backend_graph_compute(self._backend, graph)
            if status != 0:
                raise EngineError(f"the engine could not compute a graph (status {status})")

        return run

    def _release(self, kept: bool) -> None:
        while not kept and len(self._undo) > 1:
            self._undo.pop()()

    def _matrices(self, scratch: _Scratch, work: Matrices) -> int | None:
        kind = ggml_type(work.type).id
        weights = [scratch.weight(kind, work.cols, work.rows) for _ in range(work.copies)]
        inputs = [scratch.tensor(0, work.cols, work.tokens)]
        scratch.allocate_plain(self._buffer_type)
        for buffer_type in (*self._extra_types(), self._buffer_type):
            if not scratch.allocate_weights(buffer_type):
                continue
            nodes = [scratch.node("ggml_mul_mat", weight, inputs[0]) for weight in weights]
            if self._base.ggml_backend_dev_supports_op(self._device, nodes[0]):
                scratch.allocate_nodes(self._buffer_type)
                scratch.keep_weights()
                self._fill(scratch, weights, work.type)
                self._fill(scratch, inputs, "F32")
                return nodes[-1]
            scratch.drop_weights()
            weights = [scratch.weight(kind, work.cols, work.rows) for _ in range(work.copies)]
        return None

    def _fill(self, scratch: _Scratch, tensors: list[int], kind: str) -> None:
        if self._is_cpu:
            scratch.fill(tensors, _sample(kind.upper()))

    def _extra_types(self) -> list[int]:
        """Buffer types that repack weights for this CPU: the engine's loader prefers them (llama-model.cpp)."""
        function = self._base.ggml_backend_reg_get_proc_address(self._registry, b"ggml_backend_dev_get_extra_bufts")
        found: list[int] = []
        if function:
            entries = _EXTRA_TYPES(function)(self._device)
            while entries and entries[len(found)]:
                found.append(int(entries[len(found)]))
        return found

    def _attention(self, scratch: _Scratch, work: Attention) -> int | None:
        kind = ggml_type(work.type).id
        queries = scratch.tensor(0, work.size, work.heads, work.tokens)
        mask = scratch.tensor(1, work.cells, work.tokens)
        pairs = [
            tuple(scratch.tensor(kind, work.size, work.kv_heads, work.cells) for _ in range(2))
            for _ in range(work.copies)
        ]
        scratch.allocate_plain(self._buffer_type)
        self._fill(scratch, [queries], "F32")
        self._fill(scratch, [tensor for pair in pairs for tensor in pair], work.type)
        first = scratch.turned(queries)
        node = None
        for k, v in pairs:
            node = scratch.node(
                "ggml_flash_attn_ext", first, scratch.turned(k), scratch.turned(v), mask, work.size**-0.5, 0.0, 0.0
            )
        if node is None or not self._base.ggml_backend_dev_supports_op(self._device, node):
            return None
        scratch.allocate_nodes(self._buffer_type)
        return node

    def _chain(self, scratch: _Scratch, nodes: int) -> int | None:
        value = scratch.tensor(0, 512)
        other = scratch.tensor(0, 512)
        scratch.allocate_plain(self._buffer_type)
        for _ in range(nodes):
            value = scratch.node("ggml_add", value, other)
        scratch.allocate_nodes(self._buffer_type)
        return value

    def copies(self, size: int, pinned: bool) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Copies of `size` bytes to the device and back. `pinned`: of page-locked memory; None where there is none."""
        scratch = _Scratch(self._base, self._device)
        tensor = scratch.tensor(0, size // 4)
        scratch.allocate_plain(self._buffer_type)
        if pinned:
            host_type = self._base.ggml_backend_dev_host_buffer_type(self._device)
            buffer = self._base.ggml_backend_buft_alloc_buffer(host_type, size) if host_type else None
            if not buffer:
                scratch.free()
                return None
            scratch.frees.append(lambda: self._base.ggml_backend_buffer_free(buffer))
            memory = self._base.ggml_backend_buffer_get_base(buffer)
        else:
            owner = ctypes.create_string_buffer(size)
            scratch.owners.append(owner)
            memory = ctypes.addressof(owner)
        ctypes.memset(memory, _FILL, size)
        self._undo.append(scratch.free)
        return (
            lambda: self._base.ggml_backend_tensor_set(tensor, memory, 0, size),
            lambda: self._base.ggml_backend_tensor_get(tensor, memory, 0, size),
        )

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class _Scratch:
    """Tensors of one graph: weights, plain inputs and nodes each have a context, so that each gets its own buffer."""

    def __init__(self, base: ctypes.CDLL, device: int) -> None:
        self._base, self._device = base, device
        self.frees: list[Callable[[], None]] = []
        self.owners: list[object] = []
        size = base.ggml_tensor_overhead() * _NODES
        self._plain, self._weights = self._context(size), self._context(size)
        self._nodes = self._context(2 * size + base.ggml_graph_overhead_custom(_NODES, False))
        self._cgraph = base.ggml_new_graph_custom(self._nodes, _NODES, False)
        self._weight_buffer: int | None = None

    def _context(self, size: int) -> Any:
        context = self._base.ggml_init(_InitParams(size, None, True))
        self.frees.append(lambda: self._base.ggml_free(context))
        return context

    def tensor(self, kind: int, *shape: int) -> int:
        return int(self._base.ggml_new_tensor_4d(self._plain, kind, *shape, *(1,) * (4 - len(shape))))

    def weight(self, kind: int, *shape: int) -> int:
        return int(self._base.ggml_new_tensor_4d(self._weights, kind, *shape, *(1,) * (4 - len(shape))))

    def turned(self, tensor: int) -> int:
        """[size, heads, tokens] seen as [size, tokens, heads], as attention takes it. After allocation only."""
        return int(self._base.ggml_permute(self._nodes, tensor, 0, 2, 1, 3))

    def node(self, function: str, *arguments: object) -> int:
        node = int(getattr(self._base, function)(self._nodes, *arguments))
        self._base.ggml_build_forward_expand(self._cgraph, node)
        return node

    def graph(self) -> Any:
        return self._cgraph

    def allocate_plain(self, buffer_type: int) -> None:
        self._allocate(self._plain, buffer_type)

    def allocate_nodes(self, buffer_type: int) -> None:
        self._allocate(self._nodes, buffer_type)

    def _allocate(self, context: Any, buffer_type: int) -> None:
        buffer = self._base.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise MemoryError
        self.frees.append(lambda: self._base.ggml_backend_buffer_free(buffer))
        self._base.ggml_backend_buffer_clear(buffer, _FILL)

    def allocate_weights(self, buffer_type: int) -> bool:
        self._weight_buffer = self._base.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buffer_type)
        return bool(self._weight_buffer)

    def fill(self, tensors: list[int], sample: bytes) -> None:
        """Tensors of one shape, allocated one after the other: the first by the engine, which may repack it."""
        base, first = self._base, tensors[0]
        size = base.ggml_nbytes(first)
        base.ggml_backend_tensor_set(first, (sample * -(-size // len(sample)))[:size], 0, size)
        places = [base.ggml_get_data(tensor) for tensor in tensors]
        for place in places[1:]:
            ctypes.memmove(place, places[0], places[1] - places[0])

    def keep_weights(self) -> None:
        buffer = self._weight_buffer
        self._base.ggml_backend_buffer_clear(buffer, _FILL)
        self.frees.append(lambda: self._base.ggml_backend_buffer_free(buffer))

    def drop_weights(self) -> None:
        """Forgets weights that this buffer type cannot multiply with, and the nodes that used them."""
        self._base.ggml_backend_buffer_free(self._weight_buffer)
        size = self._base.ggml_tensor_overhead() * _NODES
        self._weights = self._context(size)
        self._nodes = self._context(2 * size + self._base.ggml_graph_overhead_custom(_NODES, False))
        self._cgraph = self._base.ggml_new_graph_custom(self._nodes, _NODES, False)

    def free(self) -> None:
        while self.frees:
            self.frees.pop()()
        self.owners.clear()
