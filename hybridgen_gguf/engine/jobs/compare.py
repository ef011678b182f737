"""How far a model's next-token probabilities are from those of its source, on a text. For child processes.

Scored are the later half of each chunk's positions, which have at least half a chunk of context, as upstream's
perplexity tool does. Knows no file formats. Invariant: base and candidate see the same token ids; a model compared with
itself gives a divergence of 0, a ratio of 1 and full agreement.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...printable import printable
from .evaluate import Scorer

Send = Callable[[Mapping[str, Any]], None]
_DECODED = 48  # tokens of the speed measurement
_ROWS = 64  # positions scored at once: float64 work space of 64 * n_vocab * 8 * 3 bytes, 75 MB at 49k


@dataclass(frozen=True)
class _Base:
    """What was seen of the base; its logits lie in a file: float32 [chunks, chunk / 2, n_vocab]."""

    tokens: list[int]
    sample: list[int]
    n_vocab: int
    seconds: list[float]
    decode_tps: float


def compare_job(options: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Scores each of `options["models"]` against `options["base"]` on the file `options["text"]`.

    Returns `{tokens, models: [{...}]}`; see `_Sums.result` for the fields. One model is open at a time; the base's
    logits wait in an unnamed file, or in `options["kept"]` for the next call with the same base and text.
    """
    text = Path(options["text"]).read_bytes()
    notes = Path(options["kept"] + ".json")
    with open(options["kept"], "a+b") if options["kept"] else tempfile.TemporaryFile() as kept:  # noqa: PTH123  # beside a file without a path
        if options["kept"] and notes.exists():
            base = _Base(**json.loads(notes.read_bytes()))
        else:
            base = _read_base(text, options, kept, send)
            if options["kept"]:
                notes.write_text(json.dumps(asdict(base)), encoding="utf-8")
        numbers = range(len(options["models"]))
        results = [_compared(base, number, text, options, kept=kept, send=send) for number in numbers]
    return {"tokens": len(base.tokens), "models": results}


def _read_base(text: bytes, options: Mapping[str, Any], kept: Any, send: Send) -> _Base:
    chunk: int = options["chunk"]
    with _open(options["base"], options) as model:
        tokens = _whole_chunks(model.tokens(text), options)
        seconds = []
        for start in range(0, len(tokens), chunk):
            send({"done": start, "of": (1 + len(options["models"])) * len(tokens)})
            seconds.append(_timed_read(model, tokens[start : start + chunk]))
            model.logits(chunk - chunk // 2).tofile(kept)
        speed = _decode_speed(model, tokens) if options["speed"] else 0.0
        return _Base(tokens, model.tokens(_start(text)), model.model.n_vocab, seconds, speed)


def _compared(
    base: _Base, number: int, text: bytes, options: Mapping[str, Any], *, kept: Any, send: Send
) -> dict[str, float]:
    chunk, path = options["chunk"], options["models"][number]
    sums = _Sums(base.seconds)
    kept.seek(0)
    with _open(path, options) as model:
        if model.model.n_vocab != base.n_vocab or model.tokens(_start(text)) != base.sample:
            raise _different(path, options["base"])
        for start in range(0, len(base.tokens), chunk):
            send(
                {"done": (number + 1) * len(base.tokens) + start, "of": (1 + len(options["models"])) * len(base.tokens)}
            )
            part = base.tokens[start : start + chunk]
            sums.seconds.append(_timed_read(model, part))
            _score(np.fromfile(kept, np.float32, (chunk - chunk // 2) * base.n_vocab), model, part, sums)
        speed = _decode_speed(model, base.tokens) if options["speed"] else 0.0
    return {**sums.result(chunk), "decode_tps_base": base.decode_tps, "decode_tps": speed}


def _open(path: str, options: Mapping[str, Any]) -> Scorer:
    return Scorer(Path(path), options["chunk"], options["threads"])


def _start(text: bytes) -> bytes:
    return text[:4096].decode("utf-8", "ignore").encode()


def _timed_read(scorer: Scorer, tokens: list[int]) -> float:
    started = time.perf_counter()
    scorer.read(tokens, len(tokens) // 2)
    return time.perf_counter() - started


def _whole_chunks(tokens: list[int], options: Mapping[str, Any]) -> list[int]:
    chunk = options["chunk"]
    count = len(tokens) // chunk
    if count < 1:
        raise UsageError(f"the text has {len(tokens)} tokens; at least {chunk} are needed", "give more text")
    return tokens[: min(count, options["most_chunks"] or count) * chunk]


def _different(path: str, base: str) -> UsageError:
    return UsageError(
        f"{printable(path)} and {printable(base)} have different vocabularies", "compare a model with its own source"
    )


def _score(base: NDArray[np.float32], model: Scorer, tokens: list[int], sums: _Sums) -> None:
    first = len(tokens) // 2
    count = len(tokens) - first
    ours, theirs = base.reshape(count, -1), model.logits(count)
    # The last position predicts a token of the next chunk; it is not scored.
    for row in range(0, count - 1, _ROWS):
        rows = slice(row, min(row + _ROWS, count - 1))
        sums.add(_log_probabilities(ours[rows]), _log_probabilities(theirs[rows]), np.array(tokens[first + 1 :][rows]))


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


class _Sums:
    def __init__(self, base_seconds: list[float]) -> None:
        self.base_seconds = base_seconds
        self.seconds: list[float] = []
        self._divergences: list[NDArray[np.float64]] = []
        self._base_loss: list[NDArray[np.float64]] = []
        self._loss: list[NDArray[np.float64]] = []
        self._agree = 0

    def add(self, base: NDArray[np.float64], model: NDArray[np.float64], following: NDArray[Any]) -> None:
        rows = np.arange(len(following))
        self._divergences.append((np.exp(base) * (base - model)).sum(axis=1))
        self._base_loss.append(-base[rows, following])
        self._loss.append(-model[rows, following])
        self._agree += int((base.argmax(axis=1) == model.argmax(axis=1)).sum())

    def result(self, chunk: int) -> dict[str, float]:
        """Divergences in nats a token, `top1` from 0 to 1, `*_error`: standard errors, speeds in tokens/s."""
        divergence = np.maximum(np.concatenate(self._divergences), 0.0)  # rounding can go a hair below zero
        base, model = np.concatenate(self._base_loss), np.concatenate(self._loss)
        count = len(divergence)
        difference = model - base
        ratio = float(np.exp(difference.mean()))
        top1 = self._agree / count
        return {
            "scored": count,
            "kld_mean": float(divergence.mean()),
            "kld_error": float(divergence.std() / np.sqrt(count)),
            "kld_median": float(np.median(divergence)),
            "kld_99": float(np.quantile(divergence, 0.99)),
            "ppl_base": float(np.exp(base.mean())),
            "ppl": float(np.exp(model.mean())),
            "ppl_ratio": ratio,
            "ppl_ratio_error": float(ratio * difference.std() / np.sqrt(count)),
            "top1": top1,
            "top1_error": float(np.sqrt(top1 * (1 - top1) / count)),
            "prompt_tps_base": chunk / float(np.median(self.base_seconds)),
            "prompt_tps": chunk / float(np.median(self.seconds)),
        }


def _decode_speed(scorer: Scorer, tokens: list[int]) -> float:
    """Tokens/s of single-token steps after a short prompt; the median step, so that one interruption does not count."""
    steps = min(_DECODED, scorer.chunk // 2)
    start = scorer.chunk - steps
    scorer.read(tokens[: min(start, 64)], min(start, 64) - 1)
    taken = []
    for index in range(steps):
        began = time.perf_counter()
        scorer.step(tokens[index], min(start, 64) + index)
        taken.append(time.perf_counter() - began)
    return 1.0 / float(np.median(taken))
