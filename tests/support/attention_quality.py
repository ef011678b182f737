"""Fast against stock attention on a whole model over real text: perplexity, greedy choices, divergence.

Weights are widened to F32 first. A quantized model rounds its activations to 8 bits before every product, and one such
step that falls the other way moves the logits by up to 1.5 and a token's loss by 0.09 (SmolLM2 Q4_1; as F32 0.03 and
0.0007): that noise would hide what attention changes. Invariant: the switch is left as it was found.
"""

from __future__ import annotations

import ctypes
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridgen_gguf.bench.attention import SWITCH
from hybridgen_gguf.engine.handles import start
from hybridgen_gguf.engine.jobs.evaluate import Scorer
from hybridgen_gguf.engine.library import load

_F32 = 0  # LLAMA_FTYPE_ALL_F32
Logs = NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Perplexities over the scored tokens, share of equal greedy choices, mean KL(stock, fast) in nats."""

    tokens_read: int
    tokens_scored: int
    fast: float
    stock: float
    same_choice: float
    kl: float

    @property
    def change(self) -> float:
        return self.fast / self.stock - 1


def widened(model: Path, folder: Path) -> Path:
    """The same weights as F32, in `folder`."""
    target = folder / "f32.gguf"
    parameters = start().api.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize, parameters.nthread = _F32, True, 2
    status = start().api.llama_model_quantize(str(model).encode(), str(target).encode(), ctypes.byref(parameters))
    assert status == 0, "the model could not be widened"
    return target


def compare(model: Path, tokens_wanted: int, chunk: int, threads: int) -> Quality:
    """Reads Python's own manual in chunks, each once with either path, and scores the second half of each."""
    text = "\n".join(pydoc_data.topics.topics.values())[: tokens_wanted * 8]
    losses: dict[str, list[float]] = {"fast": [], "stock": []}
    read = same = count = 0
    divergence = 0.0
    with Scorer(model, chunk, threads) as scorer:
        tokens = scorer.tokens(text.encode())
        while read < tokens_wanted:
            part = tokens[read : read + chunk]
            logs = dict(_logs(scorer, part))
            for path, values in logs.items():
                losses[path] += list(-values[np.arange(len(values)), part[chunk // 2 + 1 :]])
            same += int((logs["fast"].argmax(axis=1) == logs["stock"].argmax(axis=1)).sum())
            divergence += float((np.exp(logs["stock"]) * (logs["stock"] - logs["fast"])).sum())
            count += len(logs["fast"])
            read += chunk
    fast, stock = (float(np.exp(np.mean(losses[path]))) for path in ("fast", "stock"))
    return Quality(read, count, fast, stock, same / count, divergence / count)


def _logs(scorer: Scorer, part: list[int]) -> Iterator[tuple[str, Logs]]:
    library = load()
    before = next(switch.value for switch in library.switches() if switch.name == SWITCH)
    half = scorer.chunk // 2
    try:
        for path in ("fast", "stock"):
            library.set_switch(SWITCH, path)
            scorer.read(part, half)
            logits = scorer.logits(scorer.chunk - half)[:-1].astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            yield path, logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    finally:
        library.set_switch(SWITCH, before)
