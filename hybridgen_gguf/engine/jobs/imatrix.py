"""Collects an importance matrix: squared inputs of every matrix product, summed over a text. For child processes.

Knows one model and one list of tokens. Invariant: stopping after any saved chunk and going on gives the same file as
one run, because the sums are kept in float64 and chunks are read in order.
Source: IMatrixCollector in tools/imatrix/imatrix.cpp of the pinned engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError, HgError, UsageError
from ..abi.ggml import Tensor
from ..child import settings_from
from ..handles import start
from .evaluate import Scorer, operation_id, tensor_at, tensor_data
from .imatrix_file import Matrix, read_state, write_imatrix

Send = Callable[[Mapping[str, Any]], None]
_F32, _I32 = np.float32, np.int32
_FEWEST_ROWS = 16  # products of fewer rows are not counted (the rule of llama-imatrix)
# Upstream leaves the output out. A few channels of its input are a thousand times larger than the others: known, they
# take two thirds of the loss from a SmolLM2 whose output, which is its embedding too, has 4 or 5 bits.
_OUTPUT = ("output.weight", "token_embd.weight")


def imatrix_job(options: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Reads `options["text"]` in chunks and writes the matrix to `options["scratch"]`.

    Goes on from `options["partial"]` when that file is of the same text, model and chunk size. Returns
    `{chunks, resumed, tokens, entries, partial_data, spoiled}`: entries with experts that no token visited, and whether
    what had been saved was damaged.
    """
    collector = _Collector()
    chunk: int = options["chunk"]
    text = Path(options["text"]).read_bytes()
    for endpoint in options["rpc"]:
        start().add_rpc(endpoint)
    settings, _ = settings_from(options["settings"])
    with Scorer(Path(options["model"]), chunk, options["threads"], settings, collector.look) as scorer:
        tokens = scorer.tokens(text)
        count = len(tokens) // chunk
        if count < 2:
            raise UsageError(
                f"the text has {len(tokens)} tokens; at least {2 * chunk} are needed",
                "give more text: 50,000 tokens or more are usual",
            )
        if options["most_chunks"]:
            count = min(count, options["most_chunks"])
        facts = {"chunk_size": chunk, "tokens": count * chunk, **options["facts"]}
        done = resumed = collector.resume(Path(options["partial"]), facts)
        saved = time.monotonic()
        for index in range(done, count):
            send({"done": index, "of": count})
            scorer.read(tokens[index * chunk : (index + 1) * chunk], 0)
            collector.check()
            if time.monotonic() - saved >= options["save_every"] and index + 1 < count:
                _save(Path(options["partial"]), collector.matrix(index + 1, facts))
                saved = time.monotonic()
        send({"done": count, "of": count})
    matrix = collector.matrix(count, facts)
    if not matrix.sums:
        raise EngineError("no matrix product of this model was seen", "importance matrices need a text model")
    write_imatrix(Path(options["scratch"]), matrix)
    empty = sorted(name for name, counts in matrix.counts.items() if not counts.all())
    entries = len(matrix.sums)
    told = {"partial_data": empty, "spoiled": collector.spoiled}
    return {"chunks": count, "resumed": resumed, "tokens": facts["tokens"], "entries": entries, **told}


def _save(path: Path, matrix: Matrix) -> None:
    fresh = path.with_name(path.name + ".new")
    write_imatrix(fresh, matrix, exact=True)
    fresh.replace(path)


class _Collector:
    """Sums by weight name."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}
        self._dense = operation_id("MUL_MAT")
        self._experts = operation_id("MUL_MAT_ID")
        self._fault: Exception | None = None
        self.spoiled = False  # a saved state was there and could not be used

    def look(self, address: Any, ask: bool) -> bool:
        """The engine's callback. Errors must not cross the C code: they are kept for `check`."""
        tensor = tensor_at(address)
        if ask:
            return self._wanted(tensor)
        try:
            self._add(tensor)
        except Exception as fault:
            self._fault = fault
            return False
        return True

    def check(self) -> None:
        """Raises what went wrong during the last chunk."""
        if self._fault is not None:
            raise EngineError(f"collecting the matrix failed: {self._fault}")
        bad = next((name for name, sums in self._sums.items() if not np.isfinite(sums).all()), None)
        if bad is not None:
            raise EngineError(
                f"the model computes values that are not finite before {bad}",
                "`hgguf validate` names weights that are NaN or infinite; if there are none, a step overflowed",
            )

    def matrix(self, chunks: int, facts: Mapping[str, Any]) -> Matrix:
        return Matrix(dict(self._sums), dict(self._counts), chunks, **facts)

    def resume(self, path: Path, facts: Mapping[str, Any]) -> int:
        """Takes over a saved state when it is of the same job; returns the number of chunks in it."""
        if not path.exists():
            return 0
        try:
            saved = read_state(path)
        except HgError:
            self.spoiled = True
            return 0
        if any(getattr(saved, name) != value for name, value in facts.items()):
            return 0
        self._sums = {name: values.copy() for name, values in saved.sums.items()}
        self._counts = {name: values.copy() for name, values in saved.counts.items()}
        return saved.chunks

    def _wanted(self, tensor: Tensor) -> bool:
        if tensor.op == self._experts:
            return True
        if tensor.op != self._dense:
            return False
        inputs = tensor.src[1].contents
        name = _name(tensor)
        return bool(inputs.ne[1] >= _FEWEST_ROWS and inputs.type == 0 and (name.startswith("blk.") or name in _OUTPUT))

    def _add(self, tensor: Tensor) -> None:
        inputs = tensor_data(tensor.src[1].contents, _F32)
        weights = tensor.src[0].contents
        name = _name(tensor)
        if tensor.op == self._experts:
            self._add_experts(name, weights.ne[2], inputs[0], tensor_data(tensor.src[2].contents, _I32)[0, 0])
            return
        matrices = weights.ne[2] * weights.ne[3]
        sums, counts = self._entry(name, matrices, inputs.shape[-1], 1)
        squares = np.einsum("abrc,abrc->abc", inputs, inputs, dtype=np.float64)
        for outer in range(squares.shape[0]):
            for inner in range(squares.shape[1]):
                sums[(outer % weights.ne[3]) * weights.ne[2] + inner % weights.ne[2]] += squares[outer, inner]
        counts += inputs.shape[0] * inputs.shape[1] * inputs.shape[2] / matrices

    def _add_experts(self, name: str, experts: int, inputs: NDArray[Any], ids: NDArray[Any]) -> None:
        # inputs: [tokens, slots, columns]; ids: [tokens, slots used]. With one slot all experts get the same input.
        sums, counts = self._entry(name, experts, inputs.shape[-1], experts)
        squares = inputs.astype(np.float64) ** 2
        for slot in range(ids.shape[1]):
            np.add.at(sums, ids[:, slot], squares[:, slot % inputs.shape[1]])
            np.add.at(counts, ids[:, slot], 1.0)

    def _entry(self, name: str, matrices: int, columns: int, counted: int) -> tuple[NDArray[Any], NDArray[Any]]:
        if name not in self._sums:
            self._sums[name] = np.zeros((matrices, columns))
            self._counts[name] = np.zeros(counted)
        return self._sums[name].reshape(matrices, columns), self._counts[name]


def _name(tensor: Tensor) -> str:
    # The scheduler names copies CPU#blk.0.attn_q.weight#0.
    name: str = tensor.src[0].contents.name.decode("utf-8", "replace")
    return name.split("#")[1] if "#" in name else name
