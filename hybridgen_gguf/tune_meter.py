"""Measures settings of an open model for `tune`: reads a fixed text, then writes fixed tokens after it.

One model stays open; a context is made anew only where a setting asks for another. Random tokens would do for the
speed, but not for comparing what cache types do to the model's choices, so the text is plain English.
Invariant: every measurement of one run reads and writes the same tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import psutil
from numpy.typing import NDArray

from .engine.handles import Context, Model
from .engine.settings import ContextSettings
from .tune import Sample
from .tuned import Setting

_TEXT = (
    "The river rises in the hills to the north and runs for ninety miles through farms and small towns before it "
    "meets the sea. In spring the water is high and brown, and the meadows on both banks are flooded for a week "
    "or two. People who live there build their houses on the higher ground and keep boats in their sheds. A mill "
    "stood at the bend until the war; its wheel turned day and night, and the miller could tell the level of the "
    "water by the sound it made. "
)
_LAST_WORD = 5
_WRITE = 16  # tokens in one measurement of writing
_MOST_READ_S = 2.5  # a prompt that takes longer is shortened


class EngineMeter:
    """Measures on `model`. `base`: the context settings of the plan; `tokens_read`: the length of the prompt."""

    def __init__(self, model: Model, base: ContextSettings, seconds: float, tokens_read: int = 512) -> None:
        self._model, self._base = model, base
        self._end = time.monotonic() + seconds
        self._longest = 0.0
        self._context: Context | None = None
        self._read = False
        self._reference: NDArray[np.float32] | None = None
        words = model.tokenize(_TEXT.encode(), False, False)
        most = min(tokens_read, base.n_ctx - _WRITE - 1)
        self._tokens = (words * (tokens_read // max(len(words), 1) + 1))[:most]
        self._answer = words[:_WRITE]

    @property
    def depth(self) -> int:
        """Tokens in the context when writing is measured."""
        return len(self._tokens)

    def seconds_left(self) -> float:
        """Less what the last comparison will take: start and best, twice each."""
        return self._end - time.monotonic() - _LAST_WORD * self._longest

    def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample:
        """One measurement. Raises EngineError when a context cannot be made with this setting."""
        begin = time.monotonic()
        context = self._open(setting)
        context.set_threads(setting.threads, setting.threads_batch)
        before = _cpu_seconds()
        read_s = self._time_reading(context, setting) if prompt or not self._read else float("nan")
        logits: list[NDArray[np.float32]] = []
        decode_s = self._time_writing(context, logits) if decode else float("nan")
        busy = _busy(before, _cpu_seconds())
        divergence = self._divergence(setting, logits) if decode else None
        self._longest = max(self._longest, time.monotonic() - begin)
        return Sample(decode_s, read_s if prompt else float("nan"), busy, divergence)

    def _open(self, setting: Setting) -> Context:
        wanted = replace(
            self._base,
            n_ctx=min(self._base.n_ctx, -(-(self.depth + _WRITE + 1) // 256) * 256),
            n_batch=setting.n_batch,
            n_ubatch=setting.n_ubatch,
            type_k=setting.type_k,
            type_v=setting.type_v,
            flash_attention=setting.flash_attention,
        )
        if self._context is not None and self._context.settings == wanted:
            return self._context
        self.close()
        self._context, self._read = Context(self._model, wanted), False
        return self._context

    def _time_reading(self, context: Context, setting: Setting) -> float:
        if not self._read:  # the first run of a context touches its memory for the first time
            context.decode(self._tokens[:8])
            context.synchronize()
        context.clear()
        start = time.perf_counter()
        for first in range(0, self.depth, setting.n_batch):
            context.decode(self._tokens[first : first + setting.n_batch])
        context.synchronize()
        seconds = time.perf_counter() - start
        self._read = True
        per_token = seconds / self.depth
        if seconds > _MOST_READ_S and self.depth > 128:
            self._tokens = self._tokens[: max(int(self.depth * _MOST_READ_S / seconds), 128)]
            self._read = False
        return per_token

    def _time_writing(self, context: Context, logits: list[NDArray[np.float32]]) -> float:
        if not self._read:
            context.clear()
            for first in range(0, self.depth, context.settings.n_batch):
                context.decode(self._tokens[first : first + context.settings.n_batch])
            self._read = True
        context.keep_prefix(self.depth)
        times = []
        for token in self._answer:
            start = time.perf_counter()
            context.decode((token,))
            context.synchronize()
            times.append(time.perf_counter() - start)
            logits.append(context.logits().copy())
        context.keep_prefix(self.depth)
        return float(np.median(times[1:]))

    def _divergence(self, setting: Setting, logits: list[NDArray[np.float32]]) -> float | None:
        """Of the start's next-token distribution from this setting's; the first setting measured is the start."""
        if self._reference is None:
            self._reference = _log_softmax(np.stack(logits))
            return None
        if setting.type_k == setting.type_v == self._base.type_k == self._base.type_v:
            return None
        ours = _log_softmax(np.stack(logits))
        return float(np.mean(np.sum(np.exp(self._reference) * (self._reference - ours), axis=1)))

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


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
