"""Goodness of fit for the sampler's tests: pooled chi-square, as a standard normal score.

Invariant: every pooled cell expects at least 8 counts, where the chi-square approximation holds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LIMIT = 4.9  # two-sided false-alarm rate 1e-6 for one test; seeds are fixed, so a passing test stays passing


def score(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Standard deviations that `counts` are off `probabilities`: above 0 too rough, below 0 too smooth."""
    expected = probabilities / probabilities.sum() * counts.sum()
    order = np.argsort(-expected, kind="stable")
    edges, filled = [0], 0.0
    for i, value in enumerate(expected[order]):
        filled += value
        if filled >= 8:
            edges.append(i + 1)
            filled = 0.0
    edges[-1] = len(order)  # what is left over joins the last cell
    starts = np.array(edges[:-1])
    want, got = np.add.reduceat(expected[order], starts), np.add.reduceat(counts[order], starts)
    freedom = len(want) - 1
    statistic = float(((got - want) ** 2 / want).sum())
    # Wilson and Hilferty: the cube root of a chi-square is close to normal
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
