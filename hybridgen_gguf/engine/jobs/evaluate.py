"""A model read in chunks of tokens for scoring: logits of many positions at once, and a look at every tensor computed.

Knows tokens and logits; what is done with them is the caller's business. Invariant: each chunk starts from an empty
cache, with the start token in its first place when the vocabulary wants one, as upstream's perplexity and imatrix do.
Source: include/llama.h; `ggml_tensor` in ggml/include/ggml.h; tools/perplexity/perplexity.cpp of the pinned engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...closing import Closing
from ...errors import EngineError
from ...settings import ModelSettings
from .. import log
from ..abi.ggml import Tensor
from ..handles import Model, start

Look = Callable[[ctypes.c_void_p, bool], bool]


class Scorer(Closing):
    """An open model with a context of one chunk. `look`: called for each tensor, first asking, then with its data."""

    def __init__(
        self,
        path: Path,
        chunk: int,
        threads: int,
        settings: ModelSettings = ModelSettings(),  # noqa: B008  # frozen
        look: Look | None = None,
    ) -> None:
        self.model = Model(path, settings)
        self.chunk = chunk
        api = self._api = self.model.api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = chunk
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.offload_kqv = settings.placement.kv_offload
        if look is not None:
            self._look = api.ggml_backend_sched_eval_callback(lambda tensor, ask, _data: look(tensor, ask))
            parameters.cb_eval = self._look
        self._handle: Any = api.llama_init_from_model(self.model.handle, parameters)
        if not self._handle:
            self.model.close()
            raise EngineError(f"the engine cannot make a context of {chunk} tokens: {log.last_error()}")
        self._batch = api.llama_batch_init(chunk, 0, 1)

    def tokens(self, text: bytes) -> list[int]:
        """Token ids of UTF-8 `text`, with the start token when the vocabulary wants one."""
        return self.model.tokenize(text, add_special=True, parse_special=False)

    def read(self, tokens: list[int], first_output: int) -> None:
        """Reads one chunk from an empty cache; positions from `first_output` on give logits."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._handle), True)
        batch = self._batch
        batch.n_tokens = len(tokens)
        start = self.model.bos_id if self.model.add_bos else None
        for index, token in enumerate(tokens):
            batch.token[index] = start if index == 0 and start is not None else token
            batch.pos[index] = index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index >= first_output
        status = api.llama_decode(self._handle, batch)
        if status != 0:
            raise EngineError(f"reading a chunk of {len(tokens)} tokens failed (code {status}): {log.last_error()}")
        api.llama_synchronize(self._handle)

    def logits(self, count: int) -> NDArray[np.float32]:
        """The logits of the last `read`, float32 [count, n_vocab]; a view that is valid until the next one."""
        pointer = self._api.llama_get_logits(self._handle)
        if not pointer:
            raise EngineError("the engine gives no logits for this model")
        return np.ctypeslib.as_array(pointer, shape=(count, self.model.n_vocab))

    def step(self, token: int, position: int) -> None:
        """Reads one token after `position` others, for timing a decode."""
        batch = self._batch
        batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, token, position, True
        if self._api.llama_decode(self._handle, batch) != 0:
            raise EngineError(f"decoding failed: {log.last_error()}")
        self._api.llama_synchronize(self._handle)

    def close(self) -> None:
        if self._handle:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._handle)
            self._handle = None
            self.model.close()


def tensor_at(address: Any) -> Tensor:
    """The tensor struct at the address that a `look` was called with."""
    return ctypes.cast(address, ctypes.POINTER(Tensor)).contents


def operation_id(name: str) -> int:
    """The number of the operation called `name`, such as MUL_MAT."""
    lib = start().base
    for number in range(64):
        if lib.ggml_op_name(number) == name.encode():
            return number
    raise EngineError(f"this engine has no operation {name}")


def tensor_data(tensor: Tensor, dtype: Any) -> NDArray[Any]:
    """The data of a tensor wherever it lies, shape in numpy's order; a view for host memory, a copy for a device.

    Only the first dimension must be contiguous.
    """
    lib = start().base
    size = int(sum((n - 1) * b for n, b in zip(tensor.ne, tensor.nb, strict=True))) + np.dtype(dtype).itemsize
    if lib.ggml_backend_buffer_is_host(tensor.buffer):
        raw: Any = (ctypes.c_char * size).from_address(tensor.data)
    else:
        raw = ctypes.create_string_buffer(size)
        lib.ggml_backend_tensor_get(ctypes.byref(tensor), raw, 0, size)
    flat = np.frombuffer(raw, dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(
        flat[: size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype),
        shape=tuple(reversed(tensor.ne)),
        strides=tuple(reversed(tensor.nb)),
        writeable=False,
    )
