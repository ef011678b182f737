"""How fast and how exact CPU attention is: stock and fast code, alternating in one process, beside the read bandwidth.

Knows the operator alone, no model. Reads a clock. Invariant: both paths are timed over the same tensors in the same
run, and enough layers' worth of KV rotate that no cache can hold them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engine.graphs.attention import (
    Attention,
    AttentionGraph,
    attention_isa,
    attention_switch,
    cache_bytes,
    read_bandwidth,
)
from ..errors import UsageError

SWITCH = "cpu-attention"
_ROTATE_BYTES = 320 << 20  # well above the largest last-level cache of the machines measured
_MAX_LAYERS = 256
_PROMPT_LAYERS = 4  # bound by arithmetic: caches do not matter, and stock is slow


@dataclass(frozen=True)
class AttentionOptions:
    """What to measure: every combination of types (K and V alike, or `K/V`) and cells."""

    types: tuple[str, ...] = ("f16", "q8_0", "q4_0")
    cells: tuple[int, ...] = (2048, 8192, 32768)
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    threads: int = 2
    tokens: int = 1
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class AttentionRecord:
    """One measurement. Times are medians for one layer; bytes are those of K and V, read once; errors are
    |out - exact| / |exact| against float64 over the stored keys and values; gflops counts both products in full."""

    type_k: str
    type_v: str
    cells: int
    heads: int
    kv_heads: int
    head_size: int
    threads: int
    tokens: int
    isa: str
    ms: float
    stock_ms: float
    ratio: float
    gb_s: float
    read_gb_s: float
    fraction_of_read: float
    gflops: float
    stock_gflops: float
    error: float
    stock_error: float


def run_attention_bench(options: AttentionOptions) -> list[AttentionRecord]:
    """Measures every combination. Raises UsageError for shapes that cannot be, EngineError without our engine."""
    _check(options)
    records = []
    for kind in options.types:
        type_k, _, type_v = kind.partition("/")
        for cells in options.cells:
            read = read_bandwidth(options.threads)
            records.append(_measure(options, Attention(type_k, type_v or type_k), cells, read))
    return records


def _check(options: AttentionOptions) -> None:
    numbers = (options.heads, options.kv_heads, options.head_size, options.threads, options.tokens, options.repeats)
    if min(*numbers, *options.cells) < 1 or options.heads % options.kv_heads:
        raise UsageError("heads must be a multiple of KV heads, and every number at least 1", "see --help")


def _measure(options: AttentionOptions, how: Attention, cells: int, read: float) -> AttentionRecord:
    q, k, v, mask = random_case(options, cells)
    size = cache_bytes(how.type_k, k.size) + cache_bytes(how.type_v, v.size)
    layers = _PROMPT_LAYERS if options.tokens > 8 else max(2, min(_MAX_LAYERS, -(-_ROTATE_BYTES // size)))
    with AttentionGraph(q, k, v, mask, how=how, layers=layers) as graph:
        times: dict[str, list[float]] = {"fast": [], "stock": []}
        errors: dict[str, float] = {}
        exact = attention_f64(q, *graph.stored(), mask, scale=options.head_size**-0.5)
        with attention_switch() as set_path:
            for repeat in range(options.repeats + 1):  # the first one warms up
                for path, spent in times.items():
                    set_path(path)
                    start = time.perf_counter()
                    graph.compute(options.threads)
                    if repeat:
                        spent.append((time.perf_counter() - start) * 1e3 / layers)
                    else:
                        errors[path] = relative_error(graph.output(), exact)
    fast, stock = (statistics.median(times[path]) for path in ("fast", "stock"))
    work = 2e-6 * options.tokens * options.heads * cells * options.head_size * 2
    return AttentionRecord(
        how.type_k, how.type_v, cells, options.heads, options.kv_heads, options.head_size, options.threads,
        options.tokens, attention_isa(), ms=fast, stock_ms=stock, ratio=stock / fast, gb_s=size / fast / 1e6,
        read_gb_s=read / 1e9, fraction_of_read=size / fast * 1e3 / read, gflops=work / fast, stock_gflops=work / stock,
        error=errors["fast"], stock_error=errors["stock"],
    )  # fmt: skip


Floats = NDArray[np.float32]


def random_case(options: AttentionOptions, cells: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Normal q, k, v and a causal mask over the last `tokens` cells, in the shapes of AttentionGraph."""
    draw = np.random.default_rng([options.seed, cells])
    q = draw.standard_normal((1, options.tokens, options.heads, options.head_size), np.float32)
    k = draw.standard_normal((1, cells, options.kv_heads, options.head_size), np.float32)
    v = draw.standard_normal((1, cells, options.kv_heads, options.head_size), np.float32)
    mask = np.zeros((1, 1, options.tokens, cells), np.float32)
    position = cells - options.tokens + np.arange(options.tokens)
    mask[0, 0][np.arange(cells) > position[:, None]] = -np.inf
    return q, k, v, mask


def attention_f64(
    q: Floats,
    k: Floats,
    v: Floats,
    mask: Floats | None = None,
    sinks: Floats | None = None,
    *,
    scale: float = 1.0,
    max_bias: float = 0.0,
    softcap: float = 0.0,
) -> NDArray[np.float64]:
    """Attention in float64 as ggml defines it, shapes as AttentionGraph's; rows that see nothing are 0.

    ALiBi slopes: Press et al. 2021, as in ggml_compute_forward_soft_max. Sinks: one more logit without a value.
    """
    streams, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.zeros((streams, tokens, heads, v.shape[3]))
    bias = None if mask is None else mask.astype(np.float16).astype(np.float64)
    for s in range(streams):
        for h in range(heads):
            logits = q[s, :, h].astype(np.float64) @ k[s, :, h // group].astype(np.float64).T * scale
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            if bias is not None:
                logits = logits + alibi_slope(h, heads, max_bias) * bias[s % bias.shape[0], h % bias.shape[1]]
            top = logits.max(axis=1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, float(sinks[h]))
            top[top == -np.inf] = 0.0
            weights = np.exp(logits - top)
            total = weights.sum(axis=1, keepdims=True)
            if sinks is not None:
                total += np.exp(float(sinks[h]) - top)
            total[total == 0] = 1.0
            out[s, :, h] = weights @ v[s, :, h // group].astype(np.float64) / total
    return out


def alibi_slope(head: int, heads: int, max_bias: float) -> float:
    if max_bias <= 0:
        return 1.0
    whole = 1 << (heads.bit_length() - 1)
    if head < whole:
        return float(2.0 ** (-max_bias / whole * (head + 1)))
    return float(2.0 ** (-max_bias / 2 / whole * (2 * (head - whole) + 1)))


def relative_error(out: Floats, exact: NDArray[np.float64]) -> float:
    """|out - exact| / |exact| in the Euclidean norm over everything."""
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(out - exact)) / (norm or 1.0)
