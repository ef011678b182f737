"""Matrix products of the engine: the same bits for any number of rows and threads, and float64 beside stock."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_graph import TYPES, Floats, Ggml, engine_folder
from seed import SEED

FAST = [kind for kind in TYPES if kind != "tq2_0"]
ROWS = (1, 2, 7, 32, 512)


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml(engine_folder())


def normal(*shape: int) -> Floats:
    return np.random.default_rng([SEED, *shape]).standard_normal(shape, np.float32)


def same(a: Floats, b: Floats) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n, blocks", [(16, 1), (37, 3), (1, 2), (150, 9)])
def test_rows_and_threads_do_not_change_bits(ggml: Ggml, kind: str, n: int, blocks: int) -> None:
    block = TYPES[kind][1]
    k = block * blocks if block > 1 else 32 * blocks + 5
    raw, _ = ggml.quantize(kind, normal(n, k))
    x = normal(512, k)
    whole = ggml.product(kind, raw, (n, k), x, threads=2).reshape(512, n)
    for rows in ROWS:
        for threads in (1, 2, 3, 5, 8):
            part = ggml.product(kind, raw, (n, k), x[-rows:], threads=threads).reshape(rows, n)
            assert same(part, whole[-rows:]), (rows, threads)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "q6_k", "q4_k", "f16"])
def test_rows_longer_than_a_panel(ggml: Ggml, kind: str) -> None:
    n, k = 70, 4864
    raw, _ = ggml.quantize(kind, normal(n, k))
    x = normal(19, k)
    whole = ggml.product(kind, raw, (n, k), x, threads=3).reshape(19, n)
    for row in range(19):
        assert same(ggml.product(kind, raw, (n, k), x[row : row + 1]), whole[row])


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_error_is_no_larger_than_stock(ggml: Ggml, kind: str, rows: int) -> None:
    n, k = 192, 1536
    raw, exact_weights = ggml.quantize(kind, normal(n, k))
    x = normal(rows, k)
    exact = x.astype(np.float64) @ exact_weights.T
    errors = {}
    for switch in ("fast", "stock"):
        out = ggml.product(kind, raw, (n, k), x, threads=2, switch=switch).reshape(rows, n)
        errors[switch] = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert errors["fast"] <= 1.05 * errors["stock"] + 1e-6, errors


@pytest.mark.parametrize("kind", FAST)
def test_extreme_values(ggml: Ggml, kind: str) -> None:
    """All weights and activations at their largest: whole numbers neither overflow nor are rounded."""
    n, k = 33, 1024
    for low, high in ((-1.0, 1.0), (1.0, 1.0), (-1.0, -1.0)):
        sign = np.where(normal(n, k) > 0, np.float32(high), np.float32(low))
        raw, weights = ggml.quantize(kind, sign)
        x = np.where(normal(20, k) > 0, np.float32(low), np.float32(high)) * np.float32(3)
        out = ggml.product(kind, raw, (n, k), x).reshape(20, n)
        exact = x.astype(np.float64) @ weights.T
        scale = np.abs(x.astype(np.float64)) @ np.abs(weights).T
        assert (np.abs(out - exact) <= 4e-3 * scale).all()
        assert same(ggml.product(kind, raw, (n, k), x[3:4]), out[3])


@pytest.mark.parametrize("kind", FAST)
def test_bytes_at_random_are_weights_too(ggml: Ggml, kind: str) -> None:
    """Every bit pattern of a block but its scales, which must be finite: one row and many rows agree."""
    n, k = 32, 512
    raw, _ = ggml.quantize(kind, normal(n, k))
    noise = np.random.default_rng(SEED).integers(0, 256, raw.size, np.uint8)
    if kind in ("f32", "f16", "bf16"):
        return
    mixed = np.where(np.arange(raw.size) % 3 == 0, raw, noise)
    x = normal(40, k)
    whole = ggml.product(kind, mixed, (n, k), x, threads=2).reshape(40, n)
    for row in range(0, 40, 5):
        assert same(ggml.product(kind, mixed, (n, k), x[row : row + 1]), whole[row])


def test_zero_rows_and_zero_activations(ggml: Ggml) -> None:
    for kind in FAST:
        raw, _ = ggml.quantize(kind, normal(20, 256))
        x = normal(9, 256)
        x[4] = 0
        out = ggml.product(kind, raw, (20, 256), x, threads=2).reshape(9, 20)
        assert not out[4].any()
        assert out[3].any()


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "f16", "f32"])
def test_several_matrices_share_weights(ggml: Ggml, kind: str) -> None:
    """Weights [2, n, k] for activations [6, rows, k]: each matrix of weights serves three."""
    n, k = 40, 512
    raw, _ = ggml.quantize(kind, normal(2, n, k))
    x = normal(6, 21, k)
    out = ggml.product(kind, raw, (2, n, k), x, threads=3).reshape(6, 21, n)
    half = raw.size // 2
    for i in range(6):
        part = np.ascontiguousarray(raw[(i // 3) * half : (i // 3 + 1) * half])
        assert same(ggml.product(kind, part, (n, k), x[i]), out[i])


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q4_k", "q6_k", "f16", "tq2_0"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("one_expert", [False, True])
def test_experts(ggml: Ggml, kind: str, slots: int, one_expert: bool) -> None:
    experts, n, k, tokens = 7, 48, 512, 50
    raw, _ = ggml.quantize(kind, normal(experts, n, k))
    x = normal(tokens, slots, k)
    draw = np.random.default_rng(SEED)
    ids = np.array([draw.permutation(experts - 1)[:2] for _ in range(tokens)], np.int32)  # one has no rows
    if one_expert:
        ids[:] = (3, 5)
    size = raw.size // experts
    first: Floats | None = None
    for threads in (1, 2, 5, 8):
        out = ggml.product(kind, raw, (experts, n, k), x, threads=threads, ids=ids).reshape(tokens, 2, n)
        first = out if first is None else first
        assert same(out, first)
    for token in range(0, tokens, 7):
        for slot in range(2):
            expert = int(ids[token, slot])
            part = np.ascontiguousarray(raw[expert * size : (expert + 1) * size])
            alone = ggml.product(kind, part, (n, k), x[token, slot % slots][None])
            assert same(alone, out[token, slot])
