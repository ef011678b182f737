"""Changes the thread count while text is written, when other processes take cores or give them back.

Every layer ends when its slowest thread does, so one thread without a core of its own holds all the others up: two
threads on one free core are slower than one. `Decision` is the pure core (what was seen → how many threads); `Governor`
is the hook around it that looks at the clock and at the system's counters.
Knows no engine. Invariant: 1 <= threads <= the planned number; on an idle machine the planned number is never left.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

SAMPLE_SECONDS = 0.2  # between two looks at the system's counters, which count in hundredths of a second
_ROUND_UP = 0.35  # a core that others use for less than this share still counts as free
_SLOWER = 1.2  # times the usual time of a token, before fewer threads are tried
_RECENT = 3
_CALM = 2  # samples in a row that must agree before threads are added
_PROBE_FIRST, _PROBE_MOST = 1.0, 8.0  # seconds until more threads are tried again, where counters cannot be read


class Threaded(Protocol):
    """What a governor changes (engine.handles.Context)."""

    def set_threads(self, decode: int, prompt: int) -> None: ...


@dataclass
class Decision:
    """How many threads to use. `planned`: with nobody else about; `cpus`: CPUs that this process may run on."""

    planned: int
    cpus: int
    threads: int = 0
    _usual: dict[int, float] = field(default_factory=dict)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _calm: int = 0
    _busy: int = 0
    _probe_at: float = 0.0
    _probe_wait: float = _PROBE_FIRST
    _before_probe: float = 0.0

    def __post_init__(self) -> None:
        self.threads = self.planned

    def token(self, seconds: float) -> None:
        """One token was written in `seconds`."""
        self._recent.append(seconds)
        usual = self._usual.get(self.threads)
        # Falls at once, rises slowly: a growing context slows tokens down, another process does so all of a sudden.
        self._usual[self.threads] = seconds if usual is None else min(seconds, usual * 1.002)

    def sample(self, others: float | None, now: float, looks: int = 1) -> int:
        """A look at the system; the number of threads to use from here on.

        `others`: how many of the CPUs other processes used since the last look; None: it can't be told. `looks`: how
        many there would have been meanwhile, had a token not taken so long.
        """
        chosen = self._by_time(now) if others is None else self._by_counters(others, looks)
        if chosen != self.threads:
            self._recent.clear()
            self._calm = self._busy = 0
            self.threads = chosen
        return self.threads

    @property
    def _slow(self) -> bool:
        usual = self._usual.get(self.threads)
        return usual is not None and len(self._recent) > 0 and statistics.median(self._recent) > _SLOWER * usual

    def _by_counters(self, others: float, looks: int) -> int:
        target = min(max(math.floor(self.cpus - others + _ROUND_UP), 1), self.planned)
        self._busy = self._busy + looks if target < self.threads else 0
        self._calm = self._calm + looks if target > self.threads else 0
        clearly = math.floor(self.cpus - others + 2 * _ROUND_UP) < self.threads
        if target < self.threads and (self._busy >= _CALM or (self._slow and clearly)):
            return target
        return target if self._calm >= _CALM else self.threads

    def _by_time(self, now: float) -> int:
        """Without counters: halve when tokens become slow, and try the planned number again from time to time."""
        if self.threads == self.planned:
            if len(self._recent) < _RECENT:
                return self.threads
            middle = statistics.median(self._recent)
            if self._before_probe and middle > 0.95 * self._before_probe:  # the try gained nothing
                self._probe_wait = min(2 * self._probe_wait, _PROBE_MOST)
            elif self._before_probe:
                self._before_probe, self._probe_wait = 0.0, _PROBE_FIRST
                return self.threads
            elif not self._slow:
                return self.threads
            self._probe_at = now + self._probe_wait
            return max(self.planned // 2, 1)
        if now >= self._probe_at and self._recent:
            self._before_probe = statistics.median(self._recent)
            return self.planned
        return self.threads


class Governor:
    """Called after each token; changes the context's threads when that is due.

    `others`: CPU seconds that other processes have used so far on this process's CPUs, or None; for tests.
    """

    def __init__(
        self,
        context: Threaded,
        threads: int,
        threads_batch: int,
        *,
        cpus: int | None = None,
        others: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._batch, self._clock = context, threads_batch, clock
        self._others = others or others_seconds
        self._decision = Decision(threads, cpus or _allowed_cpus())
        self._next = clock() + SAMPLE_SECONDS
        self._last = (clock(), self._others())
        self.changes = 0

    @property
    def threads(self) -> int:
        """Threads in use for decode."""
        return self._decision.threads

    def on_token(self, seconds: float) -> None:
        """After each token that was written; `seconds` without the time of sampling. Costs microseconds."""
        self._decision.token(seconds)
        self.tick()

    def tick(self) -> None:
        """Between the parts of a prompt: looks at the counters when that is due."""
        now = self._clock()
        if now < self._next:
            return
        seen = self._others()
        (then, before), self._last = self._last, (now, seen)
        self._next = now + SAMPLE_SECONDS
        used = None if seen is None or before is None else max(seen - before, 0.0) / max(now - then, 1e-6)
        was = self._decision.threads
        threads = self._decision.sample(used, now, max(int((now - then) / SAMPLE_SECONDS), 1))
        if threads != was:
            self.changes += 1
            full = threads == self._decision.planned
            self._context.set_threads(threads, self._batch if full else min(self._batch, threads))

    def rest(self) -> None:
        """Before a pause: what others do meanwhile must not count."""
        self._last = (self._clock(), self._others())


def _allowed_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def others_seconds() -> float | None:
    """CPU seconds used so far by all processes on the CPUs of this one, less its own; None where that can't be read."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii")
    except OSError:
        return _others_elsewhere()
    allowed = os.sched_getaffinity(0)
    total = 0
    for line in text.splitlines():
        name, *values = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(value) for value in values[:8])
            total += user + nice + system + irq + softirq + steal
    return total / os.sysconf("SC_CLK_TCK") - time.process_time()


def _others_elsewhere() -> float | None:
    """Without Linux's counters: the whole machine's."""
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError):
        return None
    return float(times.user + times.system) - time.process_time()
