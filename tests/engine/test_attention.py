"""CPU attention of the engine against float64, over random inputs, beside the stock code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attention_cases import Case, check, inputs, replace, run
from seed import SEED

from hybridgen_gguf.engine.graphs.attention import ATTENTION_TYPES, attention_isa

#: head size, query heads, KV heads
SHAPES = [(64, 9, 3), (128, 32, 8), (128, 64, 8), (256, 4, 1)]
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 511, 512, 513, 1023]


@pytest.mark.parametrize("kind", ATTENTION_TYPES)
@pytest.mark.parametrize("size, heads, kv_heads", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_types_and_shapes(kind: str, size: int, heads: int, kv_heads: int, tokens: int) -> None:
    check(Case(kind, kind, 700, tokens, heads, kv_heads, size, causal=True, seed=SEED))


@pytest.mark.parametrize("size", [32, 80, 96, 112, 160, 192, 512])
@pytest.mark.parametrize("tokens", [1, 9])
def test_head_sizes(size: int, tokens: int) -> None:
    check(Case(cells=130, tokens=tokens, size=size, causal=True, seed=SEED))
    if size % 32 == 0:
        check(Case("q8_0", "q4_0", cells=130, tokens=tokens, size=size, causal=True, seed=SEED))


def test_value_size_may_differ() -> None:
    for tokens in (1, 12):
        check(Case(cells=200, tokens=tokens, heads=6, kv_heads=1, size=192, size_v=128, seed=SEED))


@pytest.mark.parametrize("size", [40, 72])
def test_other_sizes_fall_back_to_stock(size: int) -> None:
    result = run(Case(cells=50, size=size, seed=SEED))
    assert np.array_equal(result.fast, result.stock)


@pytest.mark.parametrize("type_k", ATTENTION_TYPES)
@pytest.mark.parametrize("type_v", ATTENTION_TYPES)
def test_k_and_v_types_may_differ(type_k: str, type_v: str) -> None:
    for tokens in (1, 10):
        check(Case(type_k, type_v, 90, tokens, seed=SEED))


@pytest.mark.parametrize("cells", EDGES)
def test_lengths_around_block_edges(cells: int) -> None:
    for tokens in (1, 2, 9):
        check(Case(cells=cells, tokens=min(tokens, cells), causal=True, seed=SEED))
    check(Case("q8_0", "q8_0", cells=cells, seed=SEED))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 25])
def test_any_group_ratio(group: int) -> None:
    for tokens in (1, 4, 17):
        check(Case(cells=150, tokens=tokens, heads=2 * group, causal=True, seed=SEED))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 16])
def test_thread_counts(threads: int) -> None:
    for cells in (3, 40, 600):
        check(Case(cells=cells, tokens=1, threads=threads, seed=SEED))
        check(Case(cells=cells, tokens=2, streams=3, holes=0.3, threads=threads, seed=SEED))
    check(Case(cells=300, tokens=30, causal=True, threads=threads, seed=SEED))


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("holes", [0.1, 0.7, 0.99])
def test_masks_with_holes(tokens: int, holes: float) -> None:
    check(Case(cells=900, tokens=tokens, holes=holes, seed=SEED))
    check(Case("q8_0", "f16", cells=900, tokens=tokens, holes=holes, mask_heads=8, seed=SEED))


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_rows_that_see_nothing_are_zero_as_in_stock(tokens: int) -> None:
    case = Case(cells=300, tokens=tokens, holes=0.2, seed=SEED)
    given = inputs(case)
    assert given.mask is not None
    given.mask[0, 0, 0] = -np.inf
    result = check(case, given)
    assert not result.fast[0, 0].any()
    assert not result.stock[0, 0].any()
    given.mask[...] = -np.inf
    assert not run(case, given).fast.any()


@pytest.mark.parametrize("tokens", [1, 4])
def test_masked_cells_may_hold_anything(tokens: int) -> None:
    case = Case("f32", "f32", cells=200, tokens=tokens, holes=0.0, causal=True, seed=SEED)
    clean = inputs(case)
    assert clean.mask is not None
    clean.mask[..., 50:90] = -np.inf
    exact = run(case, clean).fast
    clean.k[:, 50:90] = np.nan
    clean.v[:, 50:90] = np.inf
    assert np.array_equal(run(case, clean).fast, exact)


def test_only_masked_parts_differ_between_threads() -> None:
    """All live cells in one stretch: threads must share that stretch, and none may add anything for the rest."""
    case = Case(cells=2000, window=90, causal=True, threads=4, seed=SEED)
    for tokens in (1, 3, 16):
        check(replace(case, tokens=tokens))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_constant_values_stay_constant(kind: str) -> None:
    """The weights sum to 1: V = 1 gives 1 within 1e-6 over 65,536 cells, also where stock drifts away."""
    case = Case(kind, kind, 65536, heads=4, kv_heads=1, seed=SEED)
    for threads in (1, 3):
        given = inputs(case)
        given.v[...] = 1
        assert np.abs(run(replace(case, threads=threads), given).fast - 1).max() <= 1e-6


@pytest.mark.parametrize("tokens", [1, 6, 24])
def test_extreme_logits(tokens: int) -> None:
    """Logits of about 1e4: one cell takes all. Where two are close, the rounding of such a logit alone is 6e-4."""
    check(Case("f32", "f32", cells=333, tokens=tokens, gain=1e4, seed=SEED), least=6e-4)
    check(Case("f16", "f16", cells=333, tokens=tokens, gain=1e3, causal=True, seed=SEED), least=6e-5)


@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_sequences_and_streams(tokens: int) -> None:
    for kind in ("f16", "q4_0"):
        check(Case(kind, kind, cells=260, tokens=tokens, streams=4, holes=0.4, causal=True, threads=3, seed=SEED))
    check(Case(cells=260, tokens=tokens, streams=2, seed=SEED))


@pytest.mark.parametrize("tokens", [1, 7, 21])
def test_softcap_alibi_and_sinks(tokens: int) -> None:
    base = Case(cells=300, tokens=tokens, heads=12, kv_heads=4, seed=SEED)
    check(replace(base, softcap=30.0, gain=3))
    check(replace(base, softcap=50.0, causal=True, type_k="q8_0"))
    check(replace(base, max_bias=8.0, causal=True))
    check(replace(base, sinks=True))
    check(replace(base, sinks=True, softcap=20.0, max_bias=8.0, causal=True, window=100))


def test_sinks_alone() -> None:
    """Nothing but the sink: 0, as in stock."""
    case = Case(cells=64, sinks=True, holes=0.5, seed=SEED)
    given = inputs(case)
    assert given.mask is not None
    given.mask[...] = -np.inf
    result = run(case, given)
    assert not result.fast.any()
    assert not result.stock.any()


def test_results_do_not_depend_on_the_run() -> None:
    """The same threads give the same bits: nothing depends on which thread is faster."""
    for tokens in (1, 20):
        case = Case(cells=1000, tokens=tokens, causal=True, threads=3, seed=SEED)
        given = inputs(case)
        first = run(case, given).fast
        assert all(np.array_equal(run(case, given).fast, first) for _ in range(3))


def test_the_kernels_are_built_for_this_machine() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    if "avx512vl" in flags and "avx512bw" in flags and "avx512dq" in flags:
        integers = "avx512_vnni" in flags and "avx512vbmi" in flags
        assert attention_isa() == ("avx512-vnni" if integers else "avx512")
    elif "avx2" in flags and "f16c" in flags and "fma" in flags:
        assert attention_isa() == "avx2"
    else:
        assert attention_isa() in ("neon", "portable")
