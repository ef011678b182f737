"""A KV pool in memory, cell by cell, that behaves as the engine's unified cache: for simulations and fault tests.

`Pool` keeps which sequences hold which token at which position, and refuses what the engine refuses. `PoolSequences`
is `engine.sequences.Sequences` over it: logits that depend on every token of a sequence and on nothing else, so that a
wrong cell, a wrong fork or another's token changes the text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridgen_gguf.engine.sequences import Part, StepFailed


class Pool:
    """`size` cells; each is a token at a position with the set of sequences that hold it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cells: list[tuple[int, int, set[int]]] = []

    @property
    def used(self) -> int:
        return len(self.cells)

    def tokens(self, sequence: int) -> list[int]:
        """The sequence's tokens by position."""
        held = sorted((position, token) for position, token, holders in self.cells if sequence in holders)
        assert [position for position, _ in held] == list(range(len(held))), f"holes in sequence {sequence}"
        return [token for _, token in held]

    def add(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        assert len(self.tokens(sequence)) == position, f"sequence {sequence} goes on at {position}"
        assert self.used + len(tokens) <= self.size, "the pool is full"
        self.cells += [(position + at, token, {sequence}) for at, token in enumerate(tokens)]

    def fork(self, source: int, to: int, length: int) -> None:
        assert not self.tokens(to), f"sequence {to} is not empty"
        assert len(self.tokens(source)) >= length
        for position, _, holders in self.cells:
            if source in holders and position < length:
                holders.add(to)

    def cut(self, sequence: int, length: int) -> None:
        for position, _, holders in self.cells:
            if position >= length:
                holders.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]

    def drop(self, sequence: int) -> None:
        self.cut(sequence, 0)


class PoolSequences:
    """Sequences over a Pool, with a vocabulary of `n_vocab`. `faults`: called with the parts of each step; a text that
    it returns is the error of the step. `most_named`: steps may name sequences below that alone."""

    def __init__(self, size: int, n_batch: int = 64, n_vocab: int = 258, most_named: int = 256) -> None:
        self.pool, self.n_ctx, self.n_batch, self.n_vocab = Pool(size), size, n_batch, n_vocab
        self.most_named = most_named
        self.log: list[list[Part]] = []
        self.faults = lambda parts: ""
        self.between = lambda: None

    def decode(self, parts: Sequence[Part]) -> NDArray[np.float32]:
        self.between()
        assert parts and sum(len(part.tokens) for part in parts) <= self.n_batch
        assert all(part.sequence < self.most_named for part in parts)
        if why := self.faults(parts):
            raise StepFailed(why, ())
        self.log.append(list(parts))
        rows = []
        for part in parts:
            self.pool.add(part.sequence, part.position, part.tokens)
            if part.outputs != "none":
                rows.append(self.logits(self.pool.tokens(part.sequence)))
        return np.array(rows, np.float32).reshape(len(rows), self.n_vocab)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What follows `tokens`: a function of all of them."""
        seed = zlib.crc32(np.array(tokens, np.int64).tobytes())
        return np.random.default_rng(seed).normal(0, 3, self.n_vocab).astype(np.float32)

    def fork(self, source: int, to: int, length: int) -> None:
        self.pool.fork(source, to, length)

    def drop(self, sequence: int) -> None:
        self.pool.drop(sequence)

    def save(self, sequence: int) -> bytearray:
        return bytearray(np.array(self.pool.tokens(sequence), np.int64).tobytes())

    def restore(self, sequence: int, data: bytearray) -> bool:
        self.pool.add(sequence, 0, np.frombuffer(data, np.int64).tolist())
        return True
