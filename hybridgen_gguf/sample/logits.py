"""Plain facts about a vector of logits: its largest, their log-sum-exp, and whether it can be sampled from at all.

Pure; knows no chain and no noise. Invariant: equal logits are ranked by the smaller token id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import NotNumbers, SampleError
from . import portable
from .noise import BLOCK

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Top:
    """The k largest logits, best first (ties: smaller id first). `rest_max`, `rest_lse`: largest and log-sum-exp of all
    others.

    Both are -inf when there are no others, and NaN when they were not asked for.
    """

    ids: Ids
    logits: Logits
    rest_max: float
    rest_lse: float


def top_of(logits: Logits, k: int, *, lse: bool) -> Top:
    """`NativeSampler.top` in numpy."""
    largest = float(logits.max())
    if math.isnan(largest):
        return Top(np.zeros(1, np.int64), np.full(1, np.nan, np.float32), math.nan, math.nan)
    k = min(k, len(logits))
    if k == 1:
        ids = np.array([int(logits.argmax())])
    else:
        edge = _lower_bound(logits, k)
        ids = np.flatnonzero(logits >= edge)
        ids = ids[np.lexsort((ids, -logits[ids].astype(np.float64)))][:k]
    if not lse:
        return Top(ids, logits[ids], math.nan, math.nan)
    others = np.delete(logits, ids)
    if not len(others):
        return Top(ids, logits[ids], -math.inf, -math.inf)
    return Top(ids, logits[ids], float(others.max()), log_sum_exp(others))


def _lower_bound(logits: Logits, k: int) -> float:
    """A number that at least k logits reach and few more: the k-th largest of the blocks' largest, one pass."""
    few_blocks = k * BLOCK >= len(logits)
    tops = logits if few_blocks else np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    return float(np.partition(tops, len(tops) - k)[len(tops) - k])


def exp_total(logits: Logits, largest: float) -> float:
    """Sum of exp(logits - largest), `largest` being the largest logit: 64 running sums, then those in order.

    A fixed order of additions, the engine's own, makes the same bits everywhere.
    """
    rows = np.full((-(-len(logits) // BLOCK), BLOCK), -np.inf)
    rows.ravel()[: len(logits)] = logits
    lanes = np.zeros(BLOCK)
    for row in portable.exp(rows - largest):
        lanes += row
    return float(np.cumsum(lanes)[-1])


def log_sum_exp(values: Logits) -> float:
    wide = values.astype(np.float64)
    largest = float(wide.max())
    return largest + math.log(float(np.exp(wide - largest).sum())) if largest > -math.inf else -math.inf


_NOT_NUMBERS = "`hgguf validate` names weights that are NaN or infinite; if there are none, try another KV type"


def check_numbers(largest: float, position: int) -> None:
    if math.isnan(largest):
        raise NotNumbers(f"the model's logits at position {position} hold NaN", _NOT_NUMBERS)
    if largest == math.inf:
        raise NotNumbers(f"the model's logits at position {position} hold infinity", _NOT_NUMBERS)
    if largest == -math.inf:
        raise SampleError(f"no token is left to choose from at position {position}", "loosen --logit-bias")
