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
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...closing import Closing
from ...errors import EngineError
from ...model_file.types import ggml_type, row_bytes
from ..abi.ggml import ExtraBufferTypes, InitParams, SetThreads
from ..handles import start

_FILL = 0x11  # as half, bfloat, float or quantized scale: a small normal number
_NODES = 4096  # most nodes of one graph
_SAMPLE = 1 << 18  # numbers that are quantized once and then repeated: some thousand different scales
_SAMPLE_ROW = 1024


@functools.cache
def _sample(kind: str) -> bytes:
    """Normal numbers in rows of different size, as trained weights are, in a number format of the engine."""
    random = np.random.default_rng(1)
    rows = _SAMPLE // _SAMPLE_ROW
    sizes = np.exp(random.normal(-4.0, 0.12, (rows, 1)))
    values = np.ascontiguousarray(random.normal(0, 1, (rows, _SAMPLE_ROW)) * sizes, np.float32)
    stored = ctypes.create_string_buffer(rows * row_bytes(kind, _SAMPLE_ROW))
    start().base.ggml_quantize_chunk(
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
class AttentionNodes:
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
        self._base = library.base
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
            SetThreads(function)(self._backend, threads)

    def graph(self, work: Matrices | AttentionNodes | int, kept: bool = False) -> Callable[[], None] | None:
        """What runs `work` once and waits for it; a number means that many tiny nodes in a row. None: not supported.

        Buffers are freed with the next call of `graph`, or, when `kept`, with the device.
        """
        scratch = _Scratch(self._base, self._device)
        try:
            if isinstance(work, Matrices):
                last = self._matrices(scratch, work)
            elif isinstance(work, AttentionNodes):
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
            entries = ExtraBufferTypes(function)(self._device)
            while entries and entries[len(found)]:
                found.append(int(entries[len(found)]))
        return found

    def _attention(self, scratch: _Scratch, work: AttentionNodes) -> int | None:
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
        context = self._base.ggml_init(InitParams(size, None, True))
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
