"""Logits of the tokens that a constraint allows: what chain and draw then see is the model, given the constraint.

All that matters is looked at, and no more: asking a grammar about the whole vocabulary costs milliseconds. The K
largest allowed logits are among the M largest of all as soon as K of those are allowed; the draw from a whole softmax
is the first allowed token in the order of log-probability plus noise. Pure; knows no grammar.
Invariant: the draw from these logits is the draw from those of the whole vocabulary with every refused token at -inf.
"""

from __future__ import annotations

import numpy as np

from ..errors import SampleError
from .logits import top_of
from .noise import NoiseKey, best_of_all
from .types import Constraint, Ids, Logits, NativeSampler

_FIRST = 64  # tokens asked about at once before more are
_GROWTH = 8
_LARGEST = 2048  # finding more of the largest costs more than asking about all


def masked_by_rank(logits: Logits, wanted: int, constraint: Constraint, native: NativeSampler | None) -> Logits:
    """With at least the `wanted` largest allowed logits, or all there are; the others are -inf."""
    count = max(4 * wanted, _FIRST)
    while count < min(len(logits), _LARGEST):
        ids = native.top(logits, count, lse=False)[0] if native is not None else top_of(logits, count, lse=False).ids
        if len(ids) < count:  # NaN: the draw names it
            return logits
        allowed = ids[constraint.allowed(ids)]
        if len(allowed) >= wanted:
            return _only(logits, allowed)
        if len(allowed) * _GROWTH < wanted:  # few may come at all, and asking about all is then quick
            break
        count *= _GROWTH
    return masked(logits, constraint)


def masked_by_noise(
    logits: Logits, key: NoiseKey, scale: float, constraint: Constraint, native: NativeSampler | None
) -> Logits:
    """With the one token that the draw at temperature `scale` from the allowed ones gives; the others are -inf."""
    if not np.isfinite(logits.max()):
        return masked(logits, constraint)
    found = native.best_of_all(key, logits, scale, _FIRST) if native is not None else None
    ids = best_of_all(key, logits, float(logits.max()), scale, _FIRST).ids if found is None else found[0]
    allowed = ids[constraint.allowed(ids)]
    return _only(logits, allowed[:1]) if len(allowed) else masked(logits, constraint)


def masked(logits: Logits, constraint: Constraint) -> Logits:
    """With all allowed tokens. Raises SampleError when there is none."""
    allowed = constraint.allowed(None)
    if not allowed.any():
        raise SampleError("no token of the vocabulary goes on in the grammar", "the vocabulary may lack characters")
    return np.where(allowed, logits, np.float32(-np.inf))


def _only(logits: Logits, ids: Ids) -> Logits:
    kept = np.full_like(logits, -np.inf)
    kept[ids] = logits[ids]
    return kept
