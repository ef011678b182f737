"""How long a step takes, from rates that were predicted, corrected by what steps really took. Pure: no clock.

A step is rows of decode, each over its own depth, and tokens of prompts. Two factors, one for rows and one for prompts,
follow the measured seconds; each learns by its own share of a step. Knows no requests.
Invariant: `room` never gives more tokens than the predicted seconds allow, and times are above zero.
"""

from __future__ import annotations

from dataclasses import dataclass

_SPEED = 0.25  # of a step's error that is corrected at once: some ten steps forget a wrong prediction
_ODD = 4.0  # a step that took so many times what was predicted counts as no more than that: the machine was disturbed


@dataclass(frozen=True)
class Rates:
    """Seconds of a step's parts: `step` of any step, `row` of one more row of decode, `token` of one of a prompt; each
    of the last two also for each token that it attends to."""

    step: float
    row: float
    token: float
    row_cell: float = 0.0
    token_cell: float = 0.0


UNKNOWN = Rates(step=0.02, row=0.002, token=0.003)
"""For a machine that was not measured: a small model on a small machine; the first steps correct it."""


@dataclass(frozen=True)
class Work:
    """What a step does: `rows` of decode that attend to `row_cells` in all; `tokens` of prompts, likewise."""

    rows: int = 0
    row_cells: int = 0
    tokens: int = 0
    token_cells: int = 0


class StepTimes:
    """Predicts steps and learns from them."""

    def __init__(self, rates: Rates = UNKNOWN) -> None:
        self._rates = rates
        self._rows = self._prompts = 1.0

    def seconds(self, work: Work) -> float:
        """How long a step with this work takes."""
        return sum(self._parts(work))

    def token_seconds(self, depth: int) -> float:
        """Seconds of one more token of a prompt, after `depth` others."""
        return self._prompts * (self._rates.token + self._rates.token_cell * depth)

    def room(self, work: Work, depth: int, seconds: float) -> int:
        """Tokens of a prompt at `depth` that fit into a step of `seconds` beside `work`; none when it is full."""
        left = seconds - self.seconds(work)
        return max(int(left / self.token_seconds(depth)), 0)

    def took(self, work: Work, seconds: float) -> None:
        """Learns from a step."""
        rows, prompts = self._parts(work)
        error = min(max(seconds / (rows + prompts), 1 / _ODD), _ODD) - 1.0
        share = prompts / (rows + prompts)
        self._rows *= 1 + _SPEED * (1 - share) * error
        self._prompts *= 1 + _SPEED * share * error

    def _parts(self, work: Work) -> tuple[float, float]:
        rates = self._rates
        rows = rates.step + rates.row * work.rows + rates.row_cell * work.row_cells
        return self._rows * rows, self._prompts * (rates.token * work.tokens + rates.token_cell * work.token_cells)
