"""Attention over parts of the cells, merged, against float64 attention over all of them, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from ggml_graph import Ggml, Graph
from numpy.typing import NDArray
from seed import SEED

from hybridgen_gguf.engine.library import Library

Array = NDArray[np.float64]


@pytest.fixture(scope="module", params=["fast", "stock"])
def ggml(request: pytest.FixtureRequest, engine: Library) -> Iterator[Ggml]:
    """Both kernels: the one at memory speed, and the plain one for shapes it does not know and for its off switch."""
    engine.set_switch("cpu-attention", request.param)
    yield Ggml(engine.folder)
    engine.set_switch("cpu-attention", "fast")


@dataclass(frozen=True)
class Case:
    """Shapes: q [streams, tokens, heads, d], k and v [streams, cells, heads_kv, d], mask [streams, tokens, cells]."""

    q: Array
    k: Array
    v: Array
    mask: Array
    scale: float


def make(d: int, heads_kv: int, group: int, cells: int, tokens: int = 1, streams: int = 1, spread: float = 1.0) -> Case:
    rng = np.random.default_rng(SEED)
    q = rng.normal(size=(streams, tokens, heads_kv * group, d)).astype(np.float32).astype(np.float64) * spread
    k = rng.normal(size=(streams, cells, heads_kv, d)).astype(np.float16).astype(np.float64)
    v = rng.normal(size=(streams, cells, heads_kv, d)).astype(np.float16).astype(np.float64)
    mask = np.where(rng.random((streams, tokens, cells)) < 0.2, -np.inf, 0.0)
    mask[:, :, rng.integers(cells)] = 0.0
    return Case(q, k, v, mask, float(d) ** -0.5)


def reference(c: Case, softcap: float = 0.0, sinks: Array | None = None) -> Array:
    group = c.q.shape[2] // c.k.shape[2]
    k, v = np.repeat(c.k, group, axis=2), np.repeat(c.v, group, axis=2)
    x = np.einsum("sthd,schd->sthc", c.q, k) * c.scale
    if softcap:
        x = softcap * np.tanh(x / softcap)
    x = x + c.mask[:, :, None, :]
    top = x.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, None, :, None])
    top = np.where(np.isfinite(top), top, 0.0)
    p = np.exp(x - top)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, None, :, None] - top)
    return np.einsum("sthc,schd->sthd", p / np.where(total == 0.0, 1.0, total), v)


def part(g: Graph, c: Case, a: int, b: int, kind: str = "f16", softcap: float = 0.0, sinks: Array | None = None) -> int:
    q = g.heads_first(g.tensor(c.q))
    k = g.heads_first(g.tensor(c.k[:, a:b], kind))
    v = g.heads_first(g.tensor(c.v[:, a:b], kind))
    m = g.tensor(c.mask[:, None, :, a:b], "f16")
    s = g.tensor(sinks) if sinks is not None else None
    return int(g.b.ggml_hg_attn_part(g.ctx, q, k, v, m, s, c.scale, 0.0, softcap))


def merged(
    ggml: Ggml,
    c: Case,
    border: int,
    threads: int = 2,
    kinds: tuple[str, str] = ("f16", "f16"),
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> NDArray[np.float32]:
    streams, tokens, heads, d = c.q.shape
    with Graph(ggml) as g:
        one = part(g, c, 0, border, kinds[0], softcap, sinks)
        two = part(g, c, border, c.k.shape[1], kinds[1], softcap)
        out = g.b.ggml_hg_attn_merge(g.ctx, one, two, d, heads, tokens, streams)
        return g.compute(out, threads).reshape(streams, tokens, heads, d)


def error(out: NDArray[np.float32], ref: Array) -> float:
    assert np.isfinite(out).all()
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


# f16 keys are multiplied by queries rounded to f16: 2^-11 each, so a few 1e-4 in the logits
LIMIT = 2e-3


@pytest.mark.parametrize(("d", "heads_kv", "group"), [(64, 3, 3), (128, 8, 4), (128, 8, 8), (256, 1, 4), (80, 2, 1)])
@pytest.mark.parametrize("border", [1, 31, 32, 33, 299])
def test_two_parts_equal_the_whole(ggml: Ggml, d: int, heads_kv: int, group: int, border: int) -> None:
    c = make(d, heads_kv, group, 300)
    assert error(merged(ggml, c, border), reference(c)) < LIMIT


@pytest.mark.parametrize("tokens", [2, 16, 17, 40])
@pytest.mark.parametrize("streams", [1, 3])
def test_several_tokens_and_sequences(ggml: Ggml, tokens: int, streams: int) -> None:
    c = make(64, 3, 3, 130, tokens, streams)
    assert error(merged(ggml, c, 70), reference(c)) < LIMIT


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(ggml: Ggml, threads: int) -> None:
    c = make(128, 2, 4, 200)
    assert error(merged(ggml, c, 64, threads), reference(c)) < LIMIT


@pytest.mark.parametrize("masked", ["first", "second", "both"])
def test_a_masked_part_contributes_nothing(ggml: Ggml, masked: str) -> None:
    c = make(64, 2, 2, 96, 3)
    mask = c.mask.copy()
    if masked in ("first", "both"):
        mask[:, :, :40] = -np.inf
    if masked in ("second", "both"):
        mask[:, :, 40:] = -np.inf
    mask[:, 1:, 20:60] = -np.inf if masked == "both" else 0.0
    c = Case(c.q, c.k, c.v, mask, c.scale)
    ref, out = reference(c), merged(ggml, c, 40)
    if masked == "both":
        assert (out == 0.0).all()
    else:
        assert error(out, ref) < LIMIT


def test_extreme_logits(ggml: Ggml) -> None:
    c = make(128, 2, 4, 128, spread=1.0)
    q = np.sign(c.q) * 80.0
    k = np.sign(c.k) * 11.0
    c = Case(q, k, c.v, c.mask, c.scale)  # logits up to 1e4
    assert np.abs(np.einsum("sthd,schd->sthc", q, np.repeat(k, 4, axis=2)) * c.scale).max() > 2e3
    assert error(merged(ggml, c, 50), reference(c)) < LIMIT


def test_constant_values_stay_constant(ggml: Ggml) -> None:
    c = make(64, 2, 4, 5000)
    c = Case(c.q, c.k, np.ones_like(c.v), c.mask, c.scale)
    assert np.abs(merged(ggml, c, 1234) - 1.0).max() < 1e-5


def test_softcap_and_sinks(ggml: Ggml) -> None:
    c = make(64, 2, 2, 90, 2)
    sinks = np.random.default_rng(SEED).normal(size=4).astype(np.float32).astype(np.float64) * 3
    assert error(merged(ggml, c, 30, softcap=2.0), reference(c, softcap=2.0)) < LIMIT
    assert error(merged(ggml, c, 30, sinks=sinks), reference(c, sinks=sinks)) < LIMIT


@pytest.mark.parametrize(("kind", "limit"), [("q8_0", 1.5e-2), ("q4_0", 0.25), ("bf16", 1e-2)])
def test_the_parts_may_have_different_types(ggml: Ggml, kind: str, limit: float) -> None:
    c = make(128, 2, 4, 400)
    both = error(merged(ggml, c, 200, kinds=(kind, kind)), reference(c))
    one = error(merged(ggml, c, 200, kinds=("f16", kind)), reference(c))
    assert one < both < limit


def test_sums_are_those_of_the_logits(ggml: Ggml) -> None:
    c = make(64, 1, 2, 77)
    with Graph(ggml) as g:
        flat = g.compute(part(g, c, 0, 77))
    o, ms = flat[: 2 * 64].reshape(2, 64), flat[2 * 64 :].reshape(2, 2)
    x = np.einsum("sthd,schd->sthc", c.q, np.repeat(c.k, 2, axis=2))[0, 0] * c.scale + c.mask[0, 0]
    lse = np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1)) + x.max(axis=1)
    assert np.allclose(ms[:, 0] + np.log(ms[:, 1]), lse, atol=2e-3)
    assert error((o / ms[:, 1:]).reshape(1, 1, 2, 64), reference(c)) < LIMIT
