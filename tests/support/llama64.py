"""A llama's logits in float64, from the file's weights: what rotary settings and overridden values must give.

Rows of Q and K are in llama.cpp's order: neighbours make a pair (ggml_rope's mode NORM). Positions as in rope_yarn of
ggml-cpu/ops.cpp. Invariant: no step rounds to less than float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Positions:
    """Rotary settings, spelled out: `ext` 0 is no YaRN; `attn`: factor on cosine and sine before YaRN's own."""

    base: float = 10000.0
    scale: float = 1.0
    ext: float = 0.0
    attn: float = 1.0
    orig_ctx: int = 128
    fast: float = 32.0
    slow: float = 1.0


def logits(path: Path, tokens: Sequence[int], rope: Positions, eps: float | None = None) -> Array:
    """Of the last token, [n_vocab]. `eps`: of the norms, in place of the file's."""
    reader = gguf.GGUFReader(path)
    weights = {tensor.name: tensor.data.astype(np.float64) for tensor in reader.tensors}

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    eps = number("attention.layer_norm_rms_epsilon") if eps is None else eps
    x = weights["token_embd.weight"][list(tokens)]
    for layer in range(number("block_count")):
        w = {name.split(".", 2)[2]: data for name, data in weights.items() if name.startswith(f"blk.{layer}.")}
        h = _norm(x, w["attn_norm.weight"], eps)
        q, k, v = (h @ w[f"attn_{name}.weight"].T for name in "qkv")
        x = x + _attention(_turned(_split(q, heads), rope), _turned(_split(k, kv_heads), rope), _split(v, kv_heads)) @ (
            w["attn_output.weight"].T
        )
        h = _norm(x, w["ffn_norm.weight"], eps)
        gate = h @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    last = _norm(x[-1:], weights["output_norm.weight"], eps)
    return np.asarray(last @ weights.get("output.weight", weights["token_embd.weight"]).T)[0]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def _split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _attention(q: Array, k: Array, v: Array) -> Array:
    n, size = q.shape[1], q.shape[2]
    k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(size)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weight / weight.sum(axis=-1, keepdims=True) @ v
    return out.transpose(1, 0, 2).reshape(n, -1)


def _turned(x: Array, rope: Positions) -> Array:
    """[heads, tokens, size] turned by each token's position."""
    size = x.shape[-1]
    pair = np.arange(size // 2)
    extrapolated = np.arange(x.shape[1])[:, None] * rope.base ** (-2.0 * pair / size)
    angle, factor = rope.scale * extrapolated, rope.attn
    if rope.ext:
        edges = [
            size * math.log(rope.orig_ctx / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.fast, rope.slow)
        ]
        low, high = max(0, math.floor(edges[0])), min(size - 1, math.ceil(edges[1]))
        ramp = (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)) * rope.ext
        angle = angle * (1 - ramp) + extrapolated * ramp
        factor = factor * (1 + 0.1 * math.log(1 / rope.scale))
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
