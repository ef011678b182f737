"""Searches around a plan by measuring: placement, threads, batch sizes, flash attention, cache types. Start → fastest.

One axis after the other: a neighbour is taken when it is faster than the best so far by more than the noise of both,
and then followed on in its direction; the search ends when a whole round gains nothing, or time is up. A candidate that
comes near the best is measured again, in turns with it, so that neither one slip of the clock nor a machine that
changes meanwhile decides.
Knows no engine: `Meter` measures. Invariant: the result was measured at least twice, or it is the start.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from ..errors import EngineError
from ..plan import Draft, Limits
from ..plan.types import goal_weights
from ..tuned import Setting

LEAST_GAIN = 0.01
_NEAR = 1.04  # times the best's seconds: measured again before it is given up
QUALITY_LIMIT = 0.01  # nats of divergence per token that another cache type may cost
_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds a token, decode and prefill; `busy`: CPUs that others used meanwhile.

    `divergence`: mean divergence of the next token's distribution from the start's, in nats; None: not asked.
    """

    decode_s: float
    prompt_s: float
    busy: float = 0.0
    divergence: float | None = None


class Meter(Protocol):
    """Measures settings; what is not wanted of decode and prompt comes as NaN."""

    def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample: ...
    def seconds_left(self) -> float: ...


@dataclass
class Trial:
    """All measurements of one setting."""

    setting: Setting
    samples: list[Sample] = field(default_factory=list)
    note: str = ""

    def median(self, name: str) -> float:
        """Seconds a token; NaN when not measured."""
        values = [getattr(sample, name) for sample in self.samples if not math.isnan(getattr(sample, name))]
        return statistics.median(values) if values else math.nan

    def noise(self, name: str) -> float:
        """Relative spread of the measurements around their median."""
        values = [getattr(sample, name) for sample in self.samples if not math.isnan(getattr(sample, name))]
        middle = statistics.median(values) if values else math.nan
        return statistics.median(abs(value - middle) for value in values) / middle if len(values) > 1 else 0.0

    @property
    def divergence(self) -> float | None:
        return next((sample.divergence for sample in self.samples if sample.divergence is not None), None)

    def as_json(self) -> dict[str, Any]:
        speeds = {"decode_tps": self.median("decode_s"), "prompt_tps": self.median("prompt_s")}
        place = self.setting.place
        return {
            **asdict(self.setting),
            "place": "" if place is None else str(place),
            **{name: None if math.isnan(seconds) else round(1 / seconds, 2) for name, seconds in speeds.items()},
            "repeats": len(self.samples),
            "busy": round(max((sample.busy for sample in self.samples), default=0.0), 2),
            "divergence": self.divergence,
            "note": self.note,
        }


@dataclass(frozen=True)
class Axis:
    """What is varied: its neighbours of a setting, and which speeds it touches."""

    name: str
    neighbours: Callable[[Setting], list[Setting]]
    decode: bool
    prompt: bool


@dataclass
class Search:
    """The state and the result of one search."""

    meter: Meter
    goal: str
    depth: int
    start: Trial
    best: Trial
    trials: list[Trial]
    say: Callable[[str], None] = lambda _: None
    stopped: str = ""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def measure(self, trial: Trial, decode: bool, prompt: bool) -> None:
        """One more sample. Raises EngineError when the engine cannot do it."""
        left = self.meter.seconds_left()
        trial.samples.append(self.meter.measure(trial.setting, decode, prompt))
        self.took.append(left - self.meter.seconds_left())

    def time_is_up(self) -> bool:
        """Whether another measurement would take the time of the last comparison: start and best, twice each."""
        owed = 1 if self.best is self.start else 5
        if self.meter.seconds_left() > owed * max(self.took, default=0.0):
            return False
        self.stopped = "time was up"
        return True

    def seconds(self, trial: Trial) -> float:
        """Seconds of the use that the goal stands for; what was not measured is as at the best."""
        parts = {}
        for name in ("decode_s", "prompt_s"):
            own = trial.median(name)
            parts[name] = self.best.median(name) if math.isnan(own) else own
        decode, prompt = goal_weights(self.goal, self.depth)
        return decode * parts["decode_s"] + prompt * parts["prompt_s"]


def start_of(draft: Draft) -> Setting:
    """The setting of a plan: those fields of its context that tuning may change."""
    names = (field.name for field in fields(Setting) if field.name != "place")
    return Setting(**{name: getattr(draft.context, name) for name in names})


def axes_of(
    limits: Limits,
    most_threads: int,
    cache_types: tuple[str, ...],
    around: Callable[[Setting], list[Setting]] | None = None,
    fitting: Callable[[list[Setting]], list[Setting]] = lambda settings: settings,
) -> list[Axis]:
    """What the user left open, in the order of what there is to gain. `cache_types`: those that this model's heads can
    be stored in; `around`: neighbours of a placement, None where there is no choice; `fitting`: those that fit."""

    def threads(setting: Setting) -> list[Setting]:
        return [replace(setting, threads=n) for n in _steps(setting.threads, most_threads)]

    def threads_batch(setting: Setting) -> list[Setting]:
        return [replace(setting, threads_batch=n) for n in _steps(setting.threads_batch, most_threads)]

    axes = [] if around is None else [Axis("placement", around, True, True)]
    if limits.threads is None:
        axes.append(Axis("threads", threads, True, False))
    if limits.threads is None and limits.threads_batch is None:
        axes.append(Axis("threads_batch", threads_batch, False, True))
    if limits.n_ubatch is None and limits.n_batch is None:
        axes.append(Axis("n_ubatch", lambda s: fitting(_batches(s)), False, True))
    if limits.type_k == limits.type_v == "f16" and limits.flash_attention != "off":
        axes.append(Axis("kv type", lambda s: fitting(_caches(s, cache_types)), True, True))
    if limits.flash_attention == "auto":
        axes.append(Axis("flash_attention", lambda s: fitting(_flash(s)), True, True))
    return axes


def _steps(threads: int, most: int) -> list[int]:
    """One more, one less, half, twice."""
    near = {threads - 1, threads + 1, threads // 2, threads * 2}
    return sorted(n for n in near if 1 <= n <= most and n != threads)


def _batches(setting: Setting) -> list[Setting]:
    sizes = [size for size in (setting.n_ubatch // 2, setting.n_ubatch * 2) if 64 <= size <= 4096]
    return [replace(setting, n_ubatch=size, n_batch=max(setting.n_batch, size)) for size in sizes]


def _caches(setting: Setting, types: tuple[str, ...]) -> list[Setting]:
    flash = "auto" if setting.flash_attention == "off" else setting.flash_attention
    return [replace(setting, type_k=t, type_v=t, flash_attention=flash) for t in types if t != setting.type_k]


def _flash(setting: Setting) -> list[Setting]:
    if setting.place is not None and setting.place.placement.tiers is not None:
        return []  # two tiers need it
    if setting.flash_attention == "off":
        return [replace(setting, flash_attention="on")]
    return [replace(setting, flash_attention="off")] if setting.type_v == "f16" else []


def search(
    meter: Meter,
    start: Setting,
    axes: list[Axis],
    goal: str,
    depth: int,
    *,
    quality: float = QUALITY_LIMIT,
    say: Callable[[str], None] = lambda _: None,
) -> Search:
    """Measures until a round gains nothing or `meter` has no time left; in the end compares with the start again."""
    first = Trial(start)
    state = Search(meter, goal, depth, first, first, [first], say)
    for _ in range(2):
        state.measure(first, True, True)
    for _ in range(_ROUNDS):
        gained = [_climb(state, axis, quality) for axis in axes]
        if state.stopped or not any(gained):
            break
    state.stopped = state.stopped or "a round gained nothing"
    if state.best is not state.start:
        _settle(state)
    return state


def _climb(state: Search, axis: Axis, quality: float) -> bool:
    """Follows one axis as long as that helps. Whether it did."""
    gained = False
    tried = {trial.setting for trial in state.trials}
    while True:
        better = None
        for setting in axis.neighbours(state.best.setting):
            if setting in tried:
                continue
            if state.time_is_up():
                return gained
            tried.add(setting)
            state.say(f"{axis.name} {_value(axis, setting)}, {_progress(state)}")
            trial = Trial(setting, [], axis.name)
            state.trials.append(trial)
            if _measured(state, trial, axis) and _allowed(trial, quality) and _faster_again(state, trial, axis):
                better = trial
                state.best = _completed(state, trial, axis)
        if better is None:
            return gained
        gained = True


def _value(axis: Axis, setting: Setting) -> str:
    values = {"kv type": setting.type_k, "placement": str(setting.place)}
    return values.get(axis.name) or str(getattr(setting, axis.name))


def _progress(state: Search) -> str:
    return f"{len(state.trials)} tried, {max(state.meter.seconds_left(), 0):.0f} s left"


def _measured(state: Search, trial: Trial, axis: Axis) -> bool:
    """Whether the engine could do it at all: another process may have taken the memory meanwhile."""
    try:
        state.measure(trial, axis.decode, axis.prompt)
    except EngineError as error:
        trial.note += f"; {error.what}"
        return False
    return True


def _allowed(trial: Trial, quality: float) -> bool:
    if trial.divergence is not None and trial.divergence > quality:
        trial.note += f"; changes the text too much ({trial.divergence:.3f} nats)"
        return False
    return True


def _faster(state: Search, trial: Trial) -> bool:
    noise = max((t.noise(n) for t in (state.best, trial) for n in ("decode_s", "prompt_s")), default=0.0)
    return state.seconds(trial) < state.seconds(state.best) * (1 - max(LEAST_GAIN, noise))


def _faster_again(state: Search, trial: Trial, axis: Axis) -> bool:
    """Whether it is faster by the medians of two turns with the best."""
    if state.seconds(trial) >= state.seconds(state.best) * _NEAR:
        return False
    if state.time_is_up():
        trial.note += "; no time to confirm"
        return False
    state.measure(state.best, axis.decode, axis.prompt)
    return _measured(state, trial, axis) and _faster(state, trial)


def _completed(state: Search, trial: Trial, axis: Axis) -> Trial:
    """What an axis does not touch stays as it was measured at the best before."""
    for name, touched in (("decode_s", axis.decode), ("prompt_s", axis.prompt)):
        if not touched:
            seconds = state.best.median(name)
            trial.samples = [replace(sample, **{name: seconds}) for sample in trial.samples]
    return trial


def _settle(state: Search) -> None:
    """Start and best in turns, everything measured; the start stays when the gain does not hold."""
    state.say("comparing with the plan")
    fresh = [Trial(trial.setting) for trial in (state.start, state.best)]
    for _ in range(2):
        for trial in fresh:
            state.measure(trial, True, True)
    before, after = state.seconds(fresh[0]), state.seconds(fresh[1])
    state.start.samples, state.best.samples = fresh[0].samples, fresh[1].samples
    if after > before:
        state.best.note += "; the gain did not hold"
        state.best = state.start
