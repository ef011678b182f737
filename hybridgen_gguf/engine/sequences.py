"""Many sequences in one context: rows of several in one step, forks that copy nothing, states to host memory and back.

Knows tokens, positions and sequence numbers; no requests and no text. Needs a context with `n_sequences` above 1.
Invariant: a step that fails leaves no row of it behind in a sequence, unless the sequence cannot be rewound (then it is
emptied and `decode` says which).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from . import log
from .handles import Context

Outputs = Literal["none", "last", "all"]
Tokens = Sequence[int] | NDArray[np.int32]
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ; in one pool any number below it may be used, whatever n_seq_max is
_NO_ROOM = 1


class Part(NamedTuple):
    """Tokens of one sequence in a step, from `position` on; `outputs`: whose logits are wanted."""

    sequence: int
    position: int
    tokens: Tokens
    outputs: Outputs = "last"

    @property
    def n_outputs(self) -> int:
        return len(self.tokens) if self.outputs == "all" else int(self.outputs == "last")


class StepFailed(EngineError):
    """A step was not computed. `emptied`: sequences that lost all they held, because they cannot be rewound."""

    def __init__(self, what: str, emptied: tuple[int, ...]) -> None:
        super().__init__(what)
        self.emptied = emptied


class Sequences:
    """Steps over a context that several sequences share. One thread at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._api, self._handle = context.api, context.handle
        self._memory = self._api.llama_get_memory(self._handle)
        self.n_batch = context.settings.n_batch
        self.n_ctx = context.n_ctx
        self._n_vocab = context.model.n_vocab
        n = self.n_batch
        self._token, self._pos = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self._sequence, self._output = np.zeros(n, np.int32), np.zeros(n, np.int8)
        self._one = np.ones(n, np.int32)
        # seq_id is an array of pointers, one a row: into the row's own place in one block of ours, set once
        self._pointers = self._sequence.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        self._batch = self._filled_batch()
        self._logits_at = 0
        self._logits = np.empty((0, self._n_vocab), np.float32)

    def _filled_batch(self) -> Any:
        batch = self._api.llama_batch_get_one(None, 0)
        places: dict[str, NDArray[Any]] = {
            "token": self._token,
            "pos": self._pos,
            "n_seq_id": self._one,
            "seq_id": self._pointers,
            "logits": self._output,
        }
        kinds = dict(self._api.llama_batch._fields_)
        for name, array in places.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, kinds[name]))
        return batch

    def decode(self, parts: Sequence[Part]) -> NDArray[np.float32]:
        """Reads all parts in one step: logits, float32 [outputs, n_vocab], rows in the order of parts and tokens, valid
        until the next step. Raises StepFailed; then no part has been read."""
        at = self._filled(parts)
        self._batch.n_tokens = at
        log.lines.clear()
        status = self._api.llama_decode(self._handle, self._batch)
        if status:
            why = log.last_error() or ("there are no cells left" if status == _NO_ROOM else f"code {status}")
            raise StepFailed(f"a step of {at} tokens failed: {why}", self._undo(parts))
        return self._rows(sum(part.n_outputs for part in parts))

    def _filled(self, parts: Sequence[Part]) -> int:
        """Writes the parts' rows into the batch; how many there are."""
        if all(len(part.tokens) == 1 for part in parts):  # the usual step: four writes for all rows
            at = len(parts)
            self._token[:at] = [part.tokens[0] for part in parts]
            self._pos[:at] = [part.position for part in parts]
            self._sequence[:at] = [part.sequence for part in parts]
            self._output[:at] = [part.outputs != "none" for part in parts]
            return at
        at = 0
        for sequence, position, tokens, outputs in parts:
            end = at + len(tokens)
            self._token[at:end] = tokens
            self._pos[at:end] = np.arange(position, position + end - at)
            self._sequence[at:end] = sequence
            self._output[at:end] = outputs == "all"
            self._output[end - 1] = outputs != "none"
            at = end
        return at

    def _rows(self, count: int) -> NDArray[np.float32]:
        if not count:
            return self._logits[:0]
        pointer = self._api.llama_get_logits(self._handle)
        if not pointer:
            raise EngineError("the engine gives no logits")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_at or len(self._logits) < count:  # a view costs more than a draw, and rarely moves
            self._logits_at = address
            self._logits = np.ctypeslib.as_array(pointer, shape=(count, self._n_vocab))
        return self._logits[:count]

    def _undo(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Takes a failed step's rows out of the pool: parts of a step may have been read before another failed."""
        emptied = tuple(part.sequence for part in parts if not self.cut(part.sequence, part.position))
        for sequence in emptied:
            self.drop(sequence)
        return emptied

    def length(self, sequence: int) -> int:
        """Positions that the sequence holds."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def first(self, sequence: int) -> int:
        """The first position that is still held: above 0 where layers keep a window alone; -1 for none."""
        return int(self._api.llama_memory_seq_pos_min(self._memory, sequence))

    def fork(self, source: int, to: int, length: int) -> None:
        """`to` (empty) holds the first `length` positions of `source` too; no cell is copied."""
        self._api.llama_memory_seq_cp(self._memory, source, to, 0, length)

    def cut(self, sequence: int, length: int) -> bool:
        """Forgets what comes after `length`. False where that cannot be: a recurrent state that went on."""
        return bool(self._api.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def drop(self, sequence: int) -> None:
        """Forgets the sequence; cells that no other one holds are free at once."""
        self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def save(self, sequence: int) -> bytearray:
        """The sequence's cells and states, copied to host memory. Raises EngineError when the engine cannot."""
        size = int(self._api.llama_state_seq_get_size(self._handle, sequence))
        data = bytearray(size)
        view = (ctypes.c_uint8 * size).from_buffer(data)
        done = int(self._api.llama_state_seq_get_data(self._handle, view, size, sequence))
        if done != size or not size:
            raise EngineError("the engine does not give a sequence's state")
        return data

    def restore(self, sequence: int, data: bytearray) -> bool:
        """What `save` gave, into an empty sequence. False when there is no room."""
        view = (ctypes.c_uint8 * len(data)).from_buffer(data)
        return bool(self._api.llama_state_seq_set_data(self._handle, view, len(data), sequence))

    def forget(self) -> None:
        """Empties the pool."""
        self._api.llama_memory_clear(self._memory, False)
