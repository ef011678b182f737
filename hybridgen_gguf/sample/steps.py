"""The steps that narrow or reshape a distribution before the draw, each as llama.cpp defines it.

A step takes `Candidates` and gives `Candidates`; which steps run, and in which order, is the sampler's business. A step
at its neutral value is never called. Where llama.cpp adds up in float32, these add up in float64; ties, which llama.cpp
leaves to its sort, go to the smaller id. Knows no noise, no seed, no engine.
Invariant: a step never brings back a token that an earlier one removed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import portable

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """Tokens still in play with their logits. `ordered`: by falling logit, then by rising id. -inf marks a banned
    token."""

    ids: Ids
    logits: Floats
    ordered: bool

    def in_order(self) -> Candidates:
        """The same, ordered."""
        if self.ordered:
            return self
        return self.take(np.lexsort((self.ids, -self.logits)), ordered=True)

    def take(self, index: Ids | NDArray[np.bool_] | slice, *, ordered: bool) -> Candidates:
        """The chosen rows."""
        return Candidates(self.ids[index], self.logits[index], ordered)

    def probabilities(self) -> Floats:
        """Softmax of the logits, added up in their order: where a cut falls depends on neither numpy nor machine."""
        weights = portable.exp(self.logits - self.logits.max())
        return np.asarray(weights / np.cumsum(weights)[-1])


def top_k(c: Candidates, k: int) -> Candidates:
    """The `k` largest; k >= 1."""
    return c.in_order().take(slice(0, k), ordered=True)


def top_p(c: Candidates, p: float) -> Candidates:
    """The fewest most likely tokens whose probabilities reach `p`."""
    c = c.in_order()
    reached = int(np.searchsorted(np.cumsum(c.probabilities()), p, side="left"))
    return c.take(slice(0, reached + 1), ordered=True)


def min_p(c: Candidates, p: float) -> Candidates:
    """Tokens at least `p` times as likely as the likeliest."""
    return c.take(c.logits >= c.logits.max() + math.log(p), ordered=c.ordered)


def typical(c: Candidates, p: float) -> Candidates:
    """The fewest tokens, nearest to the expected surprise first, whose probabilities exceed `p`."""
    c = c.in_order()
    probabilities = c.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = float(np.sum(probabilities * np.where(probabilities > 0, surprise, 0.0)))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    reached = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right"))
    return c.take(np.sort(order[: reached + 1]), ordered=True)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Bans what lies more than `n` standard deviations of the logits below the largest; keeps the banned in the
    count."""
    known = c.logits[c.logits > -np.inf]
    if len(c.ids) <= 1 or not len(known):
        return c
    limit = float(known.max()) - n * float(known.std())
    return Candidates(c.ids, np.where(c.logits < limit, -np.inf, c.logits), False)


def xtc(c: Candidates, threshold: float) -> Candidates:
    """Of the tokens of probability `threshold` or more, all but the least likely are removed. The caller tossed the
    coin."""
    if len(c.ids) < 2:
        return c
    c = c.in_order()
    probabilities = c.probabilities()
    likely = int(np.count_nonzero((probabilities >= threshold) & (probabilities > 0)))  # the banned are never likely
    return c.take(slice(max(0, likely - 1), None), ordered=True)


def temperature(c: Candidates, t: float) -> Candidates:
    """Logits below the largest, divided by `t`; `t` <= 0 leaves the first of the largest alone."""
    if t <= 0:
        return c.in_order().take(slice(0, 1), ordered=True)
    with np.errstate(over="ignore"):  # a tiny t sends all but the largest to -inf, which is its meaning
        return Candidates(c.ids, (c.logits - c.logits.max()) / t, c.ordered)


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> Candidates:
    """`temperature` between t - spread and t + spread, by the entropy's share of its largest possible value."""
    if len(c.ids) <= 1:
        return c
    probabilities = c.probabilities()
    positive = probabilities[probabilities > 0]
    share = max(0.0, -float(np.sum(positive * np.log(positive))) / math.log(len(c.ids)))
    low, high = max(0.0, t - spread), t + spread
    return temperature(c, low + (high - low) * share**exponent)


def penalised(
    logits: NDArray[np.float32], counts: NDArray[np.float32], repeat: float, frequency: float, presence: float
) -> NDArray[np.float32]:
    """New float32 logits of tokens that were seen `counts` >= 1 times, in llama.cpp's own arithmetic."""
    factor = np.float32(repeat)
    scaled = np.where(logits <= 0, logits * factor, logits / factor)
    return np.asarray(scaled - (counts * np.float32(frequency) + np.float32(presence)), dtype=np.float32)
