"""The border between CPU and device for host cells: monotone in both rates, and corrected by what was seen."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hybridgen_gguf.tier_border import TierRates, cpu_tokens, observed

rates = st.builds(TierRates, st.floats(1e8, 1e12), st.floats(1e8, 1e12), st.integers(1, 64))


def test_a_server_decodes_on_the_cpu_and_streams_prompts() -> None:
    border = cpu_tokens(TierRates(cpu=80e9, link=55e9, cpu_rows=8), heads_per_kv_head=4)
    assert border == 2  # three tokens are twelve rows: 1.5 reads' time on the CPU, 1.45 by copying


def test_a_slow_cpu_is_not_used() -> None:
    assert cpu_tokens(TierRates(cpu=10e9, link=25e9), heads_per_kv_head=1) == 0
    assert cpu_tokens(TierRates(cpu=0.0, link=25e9), heads_per_kv_head=1) == 0


@given(rates, st.integers(1, 16), st.floats(1.0, 4.0))
def test_a_faster_cpu_never_moves_the_border_down_and_a_faster_link_never_up(
    r: TierRates, group: int, f: float
) -> None:
    border = cpu_tokens(r, group)
    assert cpu_tokens(replace(r, cpu=r.cpu * f), group) >= border
    assert cpu_tokens(replace(r, link=r.link * f), group) <= border


@given(rates, st.floats(1e8, 1e12))
def test_observation_ends_at_what_is_observed(r: TierRates, seen: float) -> None:
    for _ in range(100):
        r = observed(r, int(seen), 1.0)
    assert abs(r.cpu / int(seen) - 1) < 1e-3
    assert observed(r, 0, 1.0) == r
