"""The border between CPU and device for attention to host cells, corrected by what is measured while running.

Knows the engine as counters alone. Invariant: the CPU is never chosen where the measured rates say that a copy is
faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..plan.border import DEFAULT_BORDER, TierRates, cpu_tokens

_TRIAL_STEPS = 3
_LEAST_WAIT = 256  # tokens between two trials: three slow steps in so many cost little


def observed(rates: TierRates, bytes_host: int, cpu_s: float, weight: float = 0.25) -> TierRates:
    """Rates corrected by what decoding did: bytes attended to on the CPU and the seconds that took (TierCounters)."""
    if bytes_host <= 0 or cpu_s <= 0:
        return rates
    return TierRates(rates.cpu + weight * (bytes_host / cpu_s - rates.cpu), rates.link, rates.cpu_rows)


class Counters(Protocol):
    """What is read of engine.tiers.TierCounters."""

    @property
    def steps_tiered(self) -> int: ...
    @property
    def steps_streamed(self) -> int: ...
    @property
    def bytes_host(self) -> int: ...
    @property
    def bytes_streamed(self) -> int: ...
    @property
    def cpu_s(self) -> float: ...


class TieredContext(Protocol):
    """What is used of engine.handles.Context."""

    def tier_counters(self) -> Counters | None: ...
    def set_cpu_tokens(self, cpu_tokens: int) -> bool: ...
    def synchronize(self) -> None: ...


class Feedback:
    """Called after each token written; moves the border when the measured rates say so.

    The CPU's rate comes from the engine's counters. The way that is not in use is tried for a few tokens now and then.
    """

    def __init__(
        self,
        context: TieredContext,
        heads_per_kv_head: int,
        border: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context, self._group, self._clock = context, heads_per_kv_head, clock
        self.border = DEFAULT_BORDER if border is None else border
        self.rates = TierRates(0.0, 0.0)
        self._rest = 0.0  # seconds of a step beside the attention to host cells
        self._streamed = 0, 0.0  # bytes copied by the last step that did, and its seconds
        self._before = context.tier_counters()
        self._trial = 0  # steps left of a trial
        self._wait = 4  # tokens until the next one; a few first, to know the usual way

    def on_token(self, seconds: float) -> None:
        """`seconds`: of the call that read one token; what the device still computes is waited for and added."""
        start = self._clock()
        self._context.synchronize()
        seconds += self._clock() - start
        before, now = self._before, self._context.tier_counters()
        self._before = now
        if before is None or now is None or now.steps_tiered == before.steps_tiered:
            return
        if self._trial < _TRIAL_STEPS:  # the first step after a change makes a new graph
            self._learn(seconds, before, now)
        if self._trial:
            self._trial -= 1
            if not self._trial:
                self._decide()
            return
        self._wait -= 1
        if self._wait <= 0:
            self._wait, self._trial = _LEAST_WAIT, _TRIAL_STEPS
            self._context.set_cpu_tokens(0 if self.border else 1)

    def _decide(self) -> None:
        size, seconds = self._streamed
        link = size / max(seconds - self._rest, 1e-9)
        self.rates = TierRates(self.rates.cpu, link, self.rates.cpu_rows)
        self.border = cpu_tokens(self.rates, self._group)
        self._context.set_cpu_tokens(self.border)

    def _learn(self, seconds: float, before: Counters, now: Counters) -> None:
        streamed, attended = now.bytes_streamed - before.bytes_streamed, now.bytes_host - before.bytes_host
        busy = now.cpu_s - before.cpu_s
        if attended and busy > 0:
            self._rest = max(seconds - busy, 0.0)
            weight = 0.25 if self.rates.cpu else 1.0
            self.rates = observed(self.rates, attended, busy, weight)
        elif streamed:
            self._streamed = streamed, seconds
