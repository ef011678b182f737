"""Measures settings of a model for `tune`: reads a fixed text, then writes fixed tokens after it.

Weights are read anew only for a setting that places them elsewhere, a context is made only where a setting asks for
another. Random tokens would do for the speed, but not for comparing what cache types do to the model's choices, so the
text is plain English.
Invariant: every measurement of one run reads and writes the same tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import psutil
from numpy.typing import NDArray

from ..engine.handles import Context, Model
from ..loader import Prepared, open_weights
from ..settings import CELL_STEP, ModelSettings
from ..tuned import Setting
from ..units import round_up
from .places import applied
from .search import Sample

_TEXT = (
    "The river rises in the hills to the north and runs for ninety miles through farms and small towns before it "
    "meets the sea. In spring the water is high and brown, and the meadows on both banks are flooded for a week "
    "or two. People who live there build their houses on the higher ground and keep boats in their sheds. A mill "
    "stood at the bend until the war; its wheel turned day and night, and the miller could tell the level of the "
    "water by the sound it made. "
)
_WRITE = 32  # tokens in one measurement of decode
_MOST_WRITE_S = 1.0  # less of them, but at least _LEAST_WRITE, where decode takes longer
_LEAST_WRITE = 6
_PROBE = 64  # tokens that are read first, to see how many a measurement can afford
_MOST_READ_S, _MOST_READ_TIERS_S = 3.0, 10.0  # a prompt that takes longer is shortened
_TOKENS, _SHORTEST = 512, 128


class EngineMeter:
    """Measures around a plan. `seconds`: what all measurements may take; `tokens_read`: the length of the prompt.

    Cells in host memory cost nothing before the context has grown past those on the device, so a plan with two tiers is
    measured in its own context, `tokens_read` deep.
    """

    def __init__(self, prepared: Prepared, seconds: float, tokens_read: int = _TOKENS) -> None:
        self._prepared, self._plan = prepared, prepared.plan
        self._end = time.monotonic() + seconds
        self._model: Model | None = None
        self._weights: ModelSettings | None = None
        self._context: Context | None = None
        self._read = False
        self._start: Setting | None = None
        self._reference: tuple[int, NDArray[np.float32]] | None = None  # of the start: its depth, what it said there
        tiers = self._plan.placement.tiers is not None
        self._most_read = _MOST_READ_TIERS_S if tiers else _MOST_READ_S
        self._most_ctx = self._plan.context.n_ctx if tiers else 0
        words = self._opened(self._plan.model).tokenize(_TEXT.encode(), False, False)
        most = min(tokens_read, self._plan.context.n_ctx - _WRITE - 1)
        self._tokens = (words * (tokens_read // max(len(words), 1) + 1))[:most]
        self._answer = words[:_WRITE]

    @property
    def depth(self) -> int:
        """Tokens in the context when decode is measured."""
        return len(self._tokens)

    def seconds_left(self) -> float:
        """Of the time given."""
        return self._end - time.monotonic()

    def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample:
        """One measurement. Raises EngineError when a context cannot be made with this setting."""
        context = self._open(setting)
        context.set_threads(setting.threads, setting.threads_batch)
        before = _cpu_seconds()
        read_s = self._time_reading(context, setting) if prompt or not self._read else float("nan")
        logits: list[NDArray[np.float32]] = []
        decode_s = self._time_writing(context, logits) if decode else float("nan")
        busy = _busy(before, _cpu_seconds())
        divergence = self._divergence(setting, logits) if decode else None
        return Sample(decode_s, read_s if prompt else float("nan"), busy, divergence)

    def _open(self, setting: Setting) -> Context:
        draft = applied(self._plan, setting)
        n_ctx = self._most_ctx or min(draft.context.n_ctx, round_up(self.depth + _WRITE + 1, CELL_STEP))
        wanted = replace(draft.context, n_ctx=n_ctx, threads=1, threads_batch=1)  # set without a new context
        model = self._opened(draft.model)
        if self._context is not None and self._context.settings == wanted:
            return self._context
        self._close_context()
        self._context, self._read = Context(model, wanted), False
        return self._context

    def _opened(self, settings: ModelSettings) -> Model:
        """The model with its weights where `settings` want them; where the cache lies is the context's affair."""
        weights = replace(settings, placement=settings.placement.of_weights)
        if self._model is None or weights != self._weights:
            self.close()
            self._model, self._weights = open_weights(self._prepared, settings), weights
        return self._model

    def _time_reading(self, context: Context, setting: Setting) -> float:
        if not self._read:  # the first run of a context touches its memory for the first time
            start = time.perf_counter()
            context.decode(self._tokens[:_PROBE])
            context.synchronize()
            self._shorten(time.perf_counter() - start, _PROBE)
        context.clear()
        start = time.perf_counter()
        for first in range(0, self.depth, setting.n_batch):
            context.decode(self._tokens[first : first + setting.n_batch])
        context.synchronize()
        seconds = time.perf_counter() - start
        self._read = True
        per_token = seconds / self.depth
        self._shorten(seconds, self.depth)
        return per_token

    def _shorten(self, seconds: float, tokens: int) -> None:
        """Fewer tokens from here on, where so many took so long that the whole text would take too much of the time."""
        affordable = int(tokens * self._most_read / max(seconds, 1e-6))
        if affordable < self.depth and self.depth > _SHORTEST:
            self._tokens, self._read = self._tokens[: max(affordable, _SHORTEST)], False

    def _time_writing(self, context: Context, logits: list[NDArray[np.float32]]) -> float:
        if not self._read:
            context.clear()
            for first in range(0, self.depth, context.settings.n_batch):
                context.decode(self._tokens[first : first + context.settings.n_batch])
            self._read = True
        context.keep_prefix(self.depth)
        times: list[float] = []
        begin = time.perf_counter()
        for token in self._answer:
            if len(times) >= _LEAST_WRITE and time.perf_counter() - begin > _MOST_WRITE_S:
                break
            start = time.perf_counter()
            context.decode((token,))
            context.synchronize()
            times.append(time.perf_counter() - start)
            logits.append(context.logits().copy())
        context.keep_prefix(self.depth)
        return float(np.median(times[1:]))

    def _divergence(self, setting: Setting, logits: list[NDArray[np.float32]]) -> float | None:
        """Of the start's next-token distribution from this setting's; the first setting measured is the start."""
        if self._start is None or self._reference is None:
            self._start, self._reference = setting, (self.depth, _log_softmax(np.stack(logits)))
            return None
        planned = self._plan.context
        if setting.type_k == setting.type_v == planned.type_k == planned.type_v:
            return None
        if self._reference[0] != self.depth:  # the prompt was shortened since: measured again
            context = self._open(self._start)
            again: list[NDArray[np.float32]] = []
            context.set_threads(self._start.threads, self._start.threads_batch)
            self._time_writing(context, again)
            self._reference = self.depth, _log_softmax(np.stack(again))
        both = min(len(logits), len(self._reference[1]))
        ours, reference = _log_softmax(np.stack(logits[:both])), self._reference[1][:both]
        return float(np.mean(np.sum(np.exp(reference) * (reference - ours), axis=1)))

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def close(self) -> None:
        self._close_context()
        if self._model is not None:
            self._model.close()
            self._model = None


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def _cpu_seconds() -> tuple[float, float, float]:
    """(wall, CPU seconds of all processes, of this one)."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return time.perf_counter(), busy, time.process_time()


def _busy(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    wall, total, own = (b - a for a, b in zip(before, after, strict=True))
    return max((total - own) / wall, 0.0) if wall > 0.05 else 0.0
