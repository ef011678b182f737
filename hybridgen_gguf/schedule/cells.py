"""Who holds which cells of one KV pool: exact counts, cells that several sequences share counted once. Pure.

A sequence is a row of runs; a run is so many cells with the set of sequences that hold it. Mirrors what the engine does
with its own cells (llama_memory_seq_cp, llama_memory_seq_rm in a unified cache). Knows no tokens and no requests.
Invariant: `free` and the runs that somebody holds add up to `size`.
"""

from __future__ import annotations


class _Run:
    """So many consecutive cells, and the sequences that hold all of them."""

    __slots__ = ("count", "holders")

    def __init__(self, count: int, holders: set[int]) -> None:
        self.count = count
        self.holders = holders


class Cells:
    """The ledger of a pool of `size` cells."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._runs: dict[int, list[_Run]] = {}

    def length(self, sequence: int) -> int:
        """Cells that the sequence holds, alone or with others."""
        return sum(run.count for run in self._runs.get(sequence, ()))

    def alone(self, sequence: int) -> int:
        """Cells that dropping the sequence would free."""
        return sum(run.count for run in self._runs.get(sequence, ()) if len(run.holders) == 1)

    def only(self, sequences: set[int]) -> int:
        """Cells that dropping all of these sequences would free."""
        runs = {id(run): run for sequence in sequences for run in self._runs.get(sequence, ())}
        return sum(run.count for run in runs.values() if run.holders <= sequences)

    def extend(self, sequence: int, count: int) -> None:
        """Takes `count` free cells. Raises ValueError when there are fewer."""
        if count > self.free:
            raise ValueError(f"{count} cells wanted, {self.free} are free")
        runs = self._runs.setdefault(sequence, [])
        if runs and len(runs[-1].holders) == 1:
            runs[-1].count += count
        else:
            runs.append(_Run(count, {sequence}))
        self.free -= count

    def fork(self, source: int, to: int, length: int) -> None:
        """`to` (which holds nothing) holds the first `length` cells of `source` too; raises ValueError for more than
        there are."""
        if self._runs.get(to):
            raise ValueError(f"sequence {to} holds cells already")
        shared = self._split(source, length)
        for run in shared:
            run.holders.add(to)
        self._runs[to] = list(shared)

    def cut(self, sequence: int, length: int) -> None:
        """Gives up all cells after the first `length`."""
        kept = self._split(sequence, length)
        for run in self._runs[sequence][len(kept) :]:
            self._leave(run, sequence)
        self._runs[sequence] = kept

    def drop(self, sequence: int) -> None:
        """Gives up all cells of the sequence."""
        for run in self._runs.pop(sequence, ()):
            self._leave(run, sequence)

    def _leave(self, run: _Run, sequence: int) -> None:
        run.holders.discard(sequence)
        if not run.holders:
            self.free += run.count

    def _split(self, sequence: int, length: int) -> list[_Run]:
        """The runs of the first `length` cells; a run across the border becomes two for everybody who holds it."""
        runs, at = self._runs.get(sequence, []), 0
        for index, run in enumerate(runs):
            if at == length:
                return runs[:index]
            if at + run.count > length:
                rest = _Run(at + run.count - length, set(run.holders))
                run.count = length - at
                for holder in rest.holders:
                    others = self._runs[holder]
                    others.insert(others.index(run) + 1, rest)
                return self._runs[sequence][: index + 1]
            at += run.count
        if at < length:
            raise ValueError(f"sequence {sequence} holds {at} cells, not {length}")
        return list(runs)
