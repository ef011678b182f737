"""Attention over random shapes, types, masks and lengths: as exact as the stock code, whatever the combination."""

from __future__ import annotations

from attention_cases import Case, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridgen_gguf.engine.graphs.attention import ATTENTION_TYPES

EDGES = st.sampled_from([1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 511, 512, 513])
QUANTIZED = ("q8_0", "q4_0")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    type_k, type_v = draw(st.sampled_from(ATTENTION_TYPES)), draw(st.sampled_from(ATTENTION_TYPES))
    step = 32 if type_k in QUANTIZED or type_v in QUANTIZED else 16
    kv_heads = draw(st.integers(1, 4))
    cells = draw(EDGES | st.integers(1, 300))
    return Case(
        type_k,
        type_v,
        cells,
        tokens=draw(st.integers(1, 8) | st.integers(9, 70)),
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        size=step * draw(st.integers(1, 8)),
        streams=draw(st.integers(1, 3)),
        holes=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0])),
        window=draw(st.sampled_from([0, 0, 1, 40])),
        causal=draw(st.booleans()),
        max_bias=draw(st.sampled_from([0.0, 0.0, 8.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 30.0])),
        sinks=draw(st.booleans()),
        threads=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 1 << 30)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_as_exact_as_stock(case: Case) -> None:
    check(case)
