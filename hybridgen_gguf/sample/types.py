"""What a draw gives, and what a native sampler must offer. Types alone; knows no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .noise import NoiseKey

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """A token and its natural-log probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Draw:
    """One position's result.

    `token` was chosen. `logprob` and `top` (the most likely tokens, best first) are the model's own log-probabilities,
    before any step and at temperature 1; None and empty unless asked for. `draws`, when asked for, are distinct tokens
    drawn without replacement in the order drawn, `token` first, with their log-probabilities after the chain.
    """

    token: int
    logprob: float | None
    top: tuple[Scored, ...]
    draws: tuple[Scored, ...]


@dataclass(frozen=True)
class UsualChain:
    """The steps of most requests, in order: top-k (0: off, and the others with it), top-p (1: off), log of min-p (-inf:
    off), temperature."""

    top_k: int
    top_p: float
    log_min_p: float
    temperature: float


class Row(NamedTuple):
    """A draw that one native call can do together with others': from `logits`, edited already."""

    key: NoiseKey
    logits: Logits
    chain: UsualChain


class NativeSampler(Protocol):
    """The engine's own passes over logits; each gives what the numpy code gives, choices and keys bit for bit."""

    def top(self, logits: Logits, k: int, *, lse: bool) -> tuple[Ids, Logits, float, float]:
        """`top_of`, as a tuple. One row of value NaN if any logit is NaN."""
        ...

    def best_of_all(self, key: NoiseKey, logits: Logits, temperature: float, k: int) -> tuple[Ids, Floats] | None:
        """`noise.best_of_all`: ids and keys; None if a logit is NaN or the largest is infinite."""
        ...

    def chain(self, key: NoiseKey, logits: Logits, usual: UsualChain) -> int | None:
        """The steps of `usual` and one draw; None if a logit is NaN or the largest is infinite."""
        ...

    def rows(self, rows: Sequence[Row]) -> list[int | None]:
        """`chain` of each row, all in one call; without a top-k, `best_of_all`."""
        ...

    def best_of(self, key: NoiseKey, ids: Ids, scores: Floats, k: int) -> tuple[Ids, Floats]:
        """`noise.best_of`: ids and keys."""
        ...

    def exp_total(self, logits: Logits, largest: float) -> float:
        """`logits.exp_total`."""
        ...


class Constraint(Protocol):
    """Which tokens may come next."""

    def allowed(self, ids: Ids | None) -> NDArray[np.bool_]:
        """For each of `ids` (None: of the whole vocabulary) whether it may."""
        ...
