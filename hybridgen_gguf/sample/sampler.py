"""Logits → token: the chain of steps in llama.cpp's order, then a Gumbel draw.

The draw takes the largest of `log-probability + noise`, noise being a function of (seed, stream, position, token). That
is an exact draw from the softmax of what the chain left, needs no normalisation, gives k draws without replacement as
its k best, and depends on no batch, thread, device or earlier draw. A step at its neutral value costs nothing.

`draw` takes the whole vocabulary; `draw_candidates` takes what a device's own top-k brought over, and answers None in
the rare case that a token which stayed behind could have changed the result, so that both always choose the same token.
Knows no text, no model, no engine: a native sampler comes in as an object. Pure: no clock, no files; seeds come from
the caller. Invariant: equal options, seed, stream, position, accepted tokens and logits give equal results, native or
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from ..errors import SampleError
from . import noise, portable, steps
from .device import DeviceCandidates, device_candidates
from .edits import Edits
from .logits import Logits, Top, check_numbers, exp_total, log_sum_exp, top_of
from .masked import masked, masked_by_noise, masked_by_rank
from .noise import Best, NoiseKey
from .options import DEFAULT_CHAIN, SampleOptions, check_seed, parse_samplers
from .steps import Candidates
from .types import Constraint, Draw, Floats, Ids, NativeSampler, Row, Scored, UsualChain

__all__ = [
    "DEFAULT_CHAIN",
    "DeviceCandidates",
    "Draw",
    "NativeSampler",
    "SampleOptions",
    "Sampler",
    "Scored",
    "check_seed",
    "device_candidates",
    "parse_samplers",
]

_FEW = 1024  # candidates looked at before the whole vocabulary is sorted


class Sampler:
    """Draws one sequence's tokens. `accept` each token of prompt and answer; `draw` at each position.

    `seed`: 0 .. 2**32 - 1, 0 being a seed like any other. `stream` tells sequences with one seed apart.
    Raises UsageError for a bias on a token outside the vocabulary, SampleError when logits cannot be drawn from.
    """

    def __init__(
        self, options: SampleOptions, *, n_vocab: int, seed: int, stream: int = 0, native: NativeSampler | None = None
    ) -> None:
        self._options, self._n_vocab = options, n_vocab
        self._seed, self._stream = check_seed(seed), stream
        self._native = native
        active = options.active_steps()
        leading = [name for name in ("penalties", "dry") if name in active]
        while active[: len(leading)] != tuple(leading) and leading:
            leading.pop()
        self._edits = Edits(options, tuple(leading), n_vocab)
        self._chain = active[len(leading) :]
        self._usual = self._as_usual()
        self._open_chain = self._as_open()

    def accept(self, token: int) -> None:
        """Adds one token of the prompt or the answer to what penalties and DRY look back on."""
        self._edits.accept(token)

    def draw(self, logits: Logits, position: int, within: Constraint | None = None) -> Draw:
        """The token for `position` from the logits of the whole vocabulary (float32, not changed).

        `within`: the draw is from the tokens that it allows, as if the chain saw no others.
        """
        if logits.shape != (self._n_vocab,) or logits.dtype != np.float32:
            raise SampleError(f"expected {self._n_vocab} float32 logits, got {logits.shape} of {logits.dtype}")
        key = NoiseKey(self._seed, self._stream, position)
        edited = self._edits.edited(logits)
        chain = self._chain
        if within is not None:
            edited = self._within(within, edited, key)
        if self._usual is not None and self._native is not None:
            token = self._native.chain(key, edited, self._usual)
            if token is not None:
                return self._result(token, (), logits, position)
        if self._is_greedy(chain):
            best = self._top(edited, 1, position).ids
            draws: tuple[Scored, ...] = self._only(best)
        elif self._is_open(chain) and not self._options.draws:
            best = self._draw_from_all(key, edited, position)
            draws = ()
        else:
            candidates, chain = self._first(edited, chain, position)
            best, draws = self._finish(key, self._run(chain, candidates, key), position)
        return self._result(int(best[0]), draws, logits, position)

    def row(self, logits: Logits, position: int) -> Row | None:
        """What `NativeSampler.rows` takes to draw for `position`; None where `draw` must do it. Its logits are valid
        until the next call; give what was drawn to `of_row`."""
        usual = self._usual or self._open_chain
        if usual is None or self._native is None:
            return None
        return Row(NoiseKey(self._seed, self._stream, position), self._edits.edited(logits), usual)

    def of_row(self, token: int, logits: Logits, position: int) -> Draw:
        """The result of a token that was drawn by `rows`, from the logits as the model gave them."""
        return self._result(token, (), logits, position)

    def draw_candidates(self, candidates: DeviceCandidates, position: int) -> Draw | None:
        """The same from a device's largest logits alone, or None if they do not settle it (then give `draw` all
        logits).

        How many a device must send is `device_candidates`' answer for these options.
        """
        options = self._options
        check_numbers(float(candidates.logits.max()), position)
        complete = len(candidates.ids) >= self._n_vocab
        if options.logprobs and candidates.lse is None and not complete:
            return None
        order = np.lexsort((candidates.ids, -candidates.logits))
        ids, raw = candidates.ids[order], candidates.logits[order]
        floor = -math.inf if complete else float(raw[-1])
        rows = {int(token): row for row, token in enumerate(ids)} if self._edits.any else {}
        logits = self._edits.edit(raw.copy(), rows) if rows else raw
        key = NoiseKey(self._seed, self._stream, position)
        if self._is_greedy(self._chain):
            kept = steps.top_k(Candidates(ids, logits.astype(np.float64), not rows), 1)
        elif self._chain[:1] == ("top_k",) and 0 < options.top_k < self._n_vocab:
            kept = steps.top_k(Candidates(ids, logits.astype(np.float64), not rows), options.top_k)
        else:
            return self._draw_open(key, ids, raw, floor, position)
        if not complete and float(kept.logits[-1]) <= floor:
            return None
        if self._is_greedy(self._chain):
            best: Ids = kept.ids
            draws: tuple[Scored, ...] = self._only(kept.ids)
        else:
            best, draws = self._finish(key, self._run(self._chain[1:], kept, key), position)
        return self._result_of(int(best[0]), draws, ids, raw, candidates.lse)

    def _draw_open(self, key: NoiseKey, ids: Ids, raw: Logits, floor: float, position: int) -> Draw | None:
        """A draw from the full softmax, seen through its largest logits: settled unless an outsider's noise is large
        enough."""
        options = self._options
        settled = len(ids) >= self._n_vocab
        if self._edits.any or options.draws or options.logprobs or not self._is_open(self._chain):
            return None
        scale = self._scale
        largest = float(raw[0])
        with np.errstate(over="ignore"):
            best = self._best_of(key, ids, (raw.astype(np.float64) - largest) / scale, 1)
        if not settled:
            needed = float(best.keys[0]) - (floor - largest) / scale
            if len(np.setdiff1d(noise.outsiders(key, self._n_vocab, needed), ids)):
                return None
        return Draw(int(best.ids[0]), None, (), ())

    def _within(self, constraint: Constraint, logits: Logits, key: NoiseKey) -> Logits:
        """`logits` with those that matter of the allowed tokens; -inf elsewhere."""
        options, chain = self._options, self._chain
        greedy = self._is_greedy(chain)
        if greedy or chain[:1] == ("top_k",):
            return masked_by_rank(logits, 1 if greedy else options.top_k, constraint, self._native)
        if self._is_open(chain) and not options.draws:
            return masked_by_noise(logits, key, self._scale, constraint, self._native)
        return masked(logits, constraint)

    # -- the chain ---------------------------------------------------------------------------------------------------

    def _is_greedy(self, chain: tuple[str, ...]) -> bool:
        """Whether the largest logit wins whatever the other steps keep."""
        options = self._options
        cold = options.temperature <= 0 and "temperature" in chain and options.dynatemp_range == 0
        only_one = "top_k" in chain and options.top_k == 1
        return (cold or only_one) and not {"typical", "typ_p", "xtc", "penalties", "dry"} & set(chain)

    def _as_usual(self) -> UsualChain | None:
        """The chain as `NativeSampler.chain` takes it, where it covers these options."""
        o, chain = self._options, self._chain
        if self._is_greedy(chain) and not o.draws:
            return UsualChain(1, 1.0, -math.inf, 1.0)
        if o.draws or o.dynatemp_range or o.temperature <= 0 or chain[:1] != ("top_k",):
            return None
        if chain != tuple(name for name in ("top_k", "top_p", "min_p", "temperature") if name in chain):
            return None
        return UsualChain(
            top_k=min(o.top_k, self._n_vocab),
            top_p=o.top_p if "top_p" in chain else 1.0,
            log_min_p=math.log(o.min_p) if "min_p" in chain else -math.inf,
            temperature=o.temperature if "temperature" in chain else 1.0,
        )

    def _as_open(self) -> UsualChain | None:
        """A chain that leaves the whole vocabulary in play, as `NativeSampler.rows` takes it."""
        if self._options.draws or not self._is_open(self._chain) or self._is_greedy(self._chain):
            return None
        return UsualChain(0, 1.0, -math.inf, self._options.temperature if "temperature" in self._chain else 1.0)

    def _only(self, best: Ids) -> tuple[Scored, ...]:
        """The draws of a distribution that is one token."""
        return (Scored(int(best[0]), 0.0),) if self._options.draws else ()

    @property
    def _scale(self) -> float:
        """The temperature of an open chain."""
        return self._options.temperature if "temperature" in self._chain else 1.0

    def _is_open(self, chain: tuple[str, ...]) -> bool:
        """Whether the whole vocabulary stays in play under one fixed temperature."""
        return set(chain) <= {"temperature"} and not self._options.dynatemp_range

    def _first(self, logits: Logits, chain: tuple[str, ...], position: int) -> tuple[Candidates, tuple[str, ...]]:
        """From the vocabulary to candidates, by the chain's first step where that is a top-k."""
        k = self._options.top_k
        if chain[:1] == ("top_k",) and k < self._n_vocab:
            top = self._top(logits, k, position)
            return Candidates(top.ids, top.logits.astype(np.float64), True), chain[1:]
        if chain[:1] in (("top_p",), ("min_p",)) and self._n_vocab > _FEW:
            head = self._head(logits, chain[0], position)
            if head is not None:
                return head, chain[1:]
        check_numbers(float(logits.max()), position)
        return Candidates(np.arange(self._n_vocab), logits.astype(np.float64), False), chain

    def _head(self, logits: Logits, step: str, position: int) -> Candidates | None:
        """What top-p or min-p leaves of the vocabulary, if among its `_FEW` largest: spares sorting the rest."""
        top = self._top(logits, _FEW, position)
        head = Candidates(top.ids, top.logits.astype(np.float64), True)
        largest = float(head.logits[0])
        if step == "min_p":
            kept = steps.min_p(head, self._options.min_p)
        else:
            native = self._native
            total = native.exp_total(logits, largest) if native is not None else exp_total(logits, largest)
            reached = np.cumsum(portable.exp(head.logits - largest) / total)
            kept = head.take(slice(0, int(np.searchsorted(reached, self._options.top_p)) + 1), ordered=True)
            if reached[-1] < self._options.top_p:
                return None
        return kept if len(kept.ids) < _FEW else None

    def _run(self, chain: Iterable[str], c: Candidates, key: NoiseKey) -> Candidates:
        o = self._options
        actions: dict[str, Callable[[Candidates], Candidates]] = {
            "penalties": lambda c: self._edits.edit_candidates(c, "penalties"),
            "dry": lambda c: self._edits.edit_candidates(c, "dry"),
            "top_n_sigma": lambda c: steps.top_n_sigma(c, o.top_n_sigma),
            "top_k": lambda c: steps.top_k(c, o.top_k),
            "typ_p": lambda c: steps.typical(c, o.typical_p),
            "top_p": lambda c: steps.top_p(c, o.top_p),
            "min_p": lambda c: steps.min_p(c, o.min_p),
            "xtc": lambda c: steps.xtc(c, o.xtc_threshold) if noise.coin(key) < o.xtc_probability else c,
            "temperature": lambda c: (
                steps.dynamic_temperature(c, o.temperature, o.dynatemp_range, o.dynatemp_exponent)
                if o.dynatemp_range > 0
                else steps.temperature(c, o.temperature)
            ),
        }
        with np.errstate(over="ignore"):  # after a tiny temperature, what is not the best is -inf, which is its meaning
            for name in chain:
                if float(c.logits.max()) == -math.inf:
                    break
                c = actions[name](c)
        return c

    def _finish(self, key: NoiseKey, c: Candidates, position: int) -> tuple[Ids, tuple[Scored, ...]]:
        largest = float(c.logits.max())
        check_numbers(largest, position)
        scores = c.logits - largest
        best = self._best_of(key, c.ids, scores, max(1, self._options.draws))
        if not self._options.draws:
            return best.ids, ()
        total = math.log(float(np.exp(scores).sum()))
        by_id = dict(zip(c.ids.tolist(), scores.tolist(), strict=True))
        return best.ids, tuple(Scored(token, by_id[token] - total) for token in best.ids.tolist())

    def _draw_from_all(self, key: NoiseKey, logits: Logits, position: int) -> Ids:
        scale = self._scale
        if self._native is not None:
            found = self._native.best_of_all(key, logits, scale, 1)
            if found is not None:
                return found[0]
        largest = float(logits.max())
        check_numbers(largest, position)
        return noise.best_of_all(key, logits, largest, scale, 1).ids

    def _best_of(self, key: NoiseKey, ids: Ids, scores: Floats, k: int) -> Best:
        if self._native is not None:
            return Best(*self._native.best_of(key, ids, scores, k))
        return noise.best_of(key, ids, scores, k)

    def _top(self, logits: Logits, k: int, position: int, *, lse: bool = False) -> Top:
        native = self._native
        top = Top(*native.top(logits, k, lse=lse)) if native is not None else top_of(logits, k, lse=lse)
        check_numbers(float(top.logits[0]), position)
        return top

    def _result(self, token: int, draws: tuple[Scored, ...], logits: Logits, position: int) -> Draw:
        if not self._options.logprobs:
            return Draw(token, None, (), draws)
        top = self._top(logits, min(self._options.logprobs, self._n_vocab), position, lse=True)
        total = float(np.logaddexp(log_sum_exp(top.logits), top.rest_lse))
        best = tuple(Scored(int(i), float(v) - total) for i, v in zip(top.ids, top.logits, strict=True))
        return Draw(token, float(logits[token]) - total, best, draws)

    def _result_of(self, token: int, draws: tuple[Scored, ...], ids: Ids, raw: Logits, lse: float | None) -> Draw:
        n = self._options.logprobs
        if not n:
            return Draw(token, None, (), draws)
        total = log_sum_exp(raw) if lse is None else lse  # without lse these are all there are
        best = tuple(Scored(int(i), float(v) - total) for i, v in zip(ids[:n], raw[:n], strict=True))
        return Draw(token, float(raw[int(np.flatnonzero(ids == token)[0])]) - total, best, draws)
