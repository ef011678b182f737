"""Which sequence holds, or is computing, which beginning of a prompt: a tree over chunks of 256 tokens. Pure.

A node stands for one chunk after all those above it. It knows the sequences whose cells hold it, living and lately
ended, and the one that has claimed it and will compute it, so that a second prompt waits instead of computing it again.
Prompts read under different adapters have different trees. Knows no cells and no engine.
Invariant: who holds a node holds every node above it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK = 256  # tokens; as many as the engine's step of cells, so that a chunk's cells are one piece in an empty pool


class Found(NamedTuple):
    """`length` tokens are held by `holder` (None: no chunk is); `writer` is computing the next chunk (None: nobody)."""

    length: int
    holder: int | None
    writer: int | None


@dataclass(slots=True)
class _Node:
    above: _Node | None
    chunk: tuple[int, ...]
    below: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)  # in the order in which they came
    writer: int | None = None


class PrefixTree:
    """Chunks of prompts by what came before them."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._roots: dict[Hashable, _Node] = {}
        self._of: dict[int, list[_Node]] = {}  # a sequence's nodes from the root on, held or claimed

    def find(self, tokens: Sequence[int], adapters: Hashable = None) -> Found:
        """What there is of a prompt. Its last token is never counted, since its logits are needed."""
        node, length, holder = self._roots.get(adapters), 0, None
        while node is not None:
            below = self._below(node, tokens, length)
            if below is None or not below.holders:
                return Found(length, holder, None if below is None else below.writer)
            node, length, holder = below, length + self.chunk, next(iter(below.holders))
        return Found(0, None, None)

    def claim(self, sequence: int, tokens: Sequence[int], adapters: Hashable = None, held: int = 0) -> None:
        """`sequence` holds the first `held` tokens of `tokens` and will compute what nobody else has claimed yet."""
        node = self._roots.setdefault(adapters, _Node(None, ()))
        nodes = self._of[sequence] = []
        for start in range(0, len(tokens) // self.chunk * self.chunk, self.chunk):
            key = tuple(tokens[start : start + self.chunk])
            below = node.below.get(key)
            if below is None:
                below = node.below[key] = _Node(node, key)
            node = below
            nodes.append(node)
            if start + self.chunk <= held:
                node.holders[sequence] = None
            elif node.writer is None and not node.holders:
                node.writer = sequence

    def wrote(self, sequence: int, length: int) -> None:
        """The sequence now holds the first `length` tokens of what it claimed."""
        for node in self._of.get(sequence, ())[: length // self.chunk]:
            node.holders.setdefault(sequence, None)
            if node.writer == sequence:
                node.writer = None

    def drop(self, sequence: int) -> None:
        """The sequence's cells are gone, or what it claimed will not be computed."""
        for node in reversed(self._of.pop(sequence, [])):
            node.holders.pop(sequence, None)
            if node.writer == sequence:
                node.writer = None
            if node.above is not None and not (node.below or node.holders or node.writer is not None):
                node.above.below.pop(node.chunk, None)

    def __len__(self) -> int:
        """Nodes that somebody holds or computes."""
        return len({id(node) for nodes in self._of.values() for node in nodes})

    def _below(self, node: _Node, tokens: Sequence[int], length: int) -> _Node | None:
        end = length + self.chunk
        return node.below.get(tuple(tokens[length:end])) if end < len(tokens) else None
