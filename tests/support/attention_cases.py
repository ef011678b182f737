"""Attention over random inputs through both paths of the engine and in float64, for the tests of the attention kernels.

Invariant: `run` leaves the switch as it found it. A fast result counts as exact enough when its error is no larger than
the stock code's, or below FLOOR, where F32 rounding of the logits alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridgen_gguf.bench.attention import attention_f64, relative_error
from hybridgen_gguf.engine.graphs.attention import Attention, AttentionGraph, attention_switch

Floats = NDArray[np.float32]
FLOOR = 1e-6
TOLERANCE = 1.05


@dataclass(frozen=True)
class Case:
    """Shapes and features of one attention. `holes`: share of cells masked at random; `window`: cells seen at most."""

    type_k: str = "f16"
    type_v: str = "f16"
    cells: int = 100
    tokens: int = 1
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    size_v: int = 0
    streams: int = 1
    holes: float = 0.0
    window: int = 0
    causal: bool = False
    mask_heads: int = 1
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    gain: float = 1.0
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Arrays in the shapes of AttentionGraph."""

    q: Floats
    k: Floats
    v: Floats
    mask: Floats | None
    sinks: Floats | None


@dataclass(frozen=True)
class Result:
    """Outputs of both paths, the exact one, and their errors."""

    fast: Floats
    stock: Floats
    exact: NDArray[np.float64]
    error: float
    stock_error: float


def inputs(case: Case) -> Inputs:
    draw = np.random.default_rng([case.seed, case.cells, case.tokens, case.size])

    def normal(*shape: int) -> Floats:
        return draw.standard_normal(shape, np.float32)

    q = normal(case.streams, case.tokens, case.heads, case.size) * np.float32(case.gain)
    k = normal(case.streams, case.cells, case.kv_heads, case.size)
    v = normal(case.streams, case.cells, case.kv_heads, case.size_v or case.size)
    sinks = normal(case.heads) if case.sinks else None
    return Inputs(q, k, v, _mask(case, draw), sinks)


def _mask(case: Case, draw: np.random.Generator) -> Floats | None:
    if not (case.holes or case.window or case.causal or case.max_bias or case.mask_heads > 1):
        return None
    position = case.cells - case.tokens + np.arange(case.tokens)[:, None]
    distance = np.arange(case.cells)[None, :] - position
    mask = np.zeros((case.streams, case.mask_heads, case.tokens, case.cells), np.float32)
    if case.max_bias:
        mask += -np.abs(distance).astype(np.float32)
    if case.causal:
        mask[..., distance > 0] = -np.inf
    if case.window:
        mask[..., distance <= -case.window] = -np.inf
    mask[draw.random(mask.shape) < case.holes] = -np.inf
    return mask


def run(case: Case, given: Inputs | None = None) -> Result:
    g = given or inputs(case)
    how = Attention(case.type_k, case.type_v, 0.0, case.max_bias, case.softcap)
    outputs = {}
    with AttentionGraph(g.q, g.k, g.v, g.mask, g.sinks, how=how) as graph:
        keys, values = graph.stored()
        with attention_switch() as set_path:
            for path in ("fast", "stock"):
                set_path(path)
                graph.compute(case.threads)
                outputs[path] = graph.output().copy()
    scale = case.size**-0.5
    with np.errstate(invalid="ignore"):
        exact = attention_f64(
            g.q, keys, values, g.mask, g.sinks, scale=scale, max_bias=case.max_bias, softcap=case.softcap
        )
    fast, stock = outputs["fast"], outputs["stock"]
    return Result(fast, stock, exact, relative_error(fast, exact), relative_error(stock, exact))


def check(case: Case, given: Inputs | None = None, least: float = FLOOR) -> Result:
    """Runs a case and asserts that the fast path is as exact as the stock one. Inputs: fresh unless given.

    `least`: an error that is never too large.
    """
    result = run(case, given)
    assert np.isfinite(result.fast).all(), case
    assert result.error <= max(TOLERANCE * result.stock_error, least), (case, result.error, result.stock_error)
    return result


__all__ = ["FLOOR", "Case", "Inputs", "Result", "check", "inputs", "replace", "run"]
