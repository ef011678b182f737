"""Where attention to host cells is computed: on the CPU, or on the device after a copy over the link.

Pure: rates in, a number of tokens out; knows neither engine nor clock.
Invariant: the CPU is never chosen where the rates given say that the copy is faster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierRates:
    """Measured rates in bytes of host KV a second.

    cpu: the CPU's attention to host cells with one token in the micro-batch. cpu_rows: query rows that share one read
    of a KV head before the CPU is bound by arithmetic; beyond, its time grows with the rows. link: copies from host
    to device.
    """

    cpu: float
    link: float
    cpu_rows: int = 8


def cpu_tokens(rates: TierRates, heads_per_kv_head: int, most: int = 64) -> int:
    """The largest micro-batch, at most `most` tokens, whose host attention is no slower on the CPU; 0: none is."""
    if rates.cpu <= 0 or rates.link <= 0:
        return 0
    best = 0
    for tokens in range(1, most + 1):
        slowdown = max(1.0, tokens * heads_per_kv_head / rates.cpu_rows)
        if slowdown / rates.cpu > 1 / rates.link:
            break
        best = tokens
    return best


def observed(rates: TierRates, bytes_host: int, cpu_s: float, weight: float = 0.25) -> TierRates:
    """Rates corrected by what decoding did: bytes attended to on the CPU and the seconds that took (TierCounters)."""
    if bytes_host <= 0 or cpu_s <= 0:
        return rates
    return TierRates(rates.cpu + weight * (bytes_host / cpu_s - rates.cpu), rates.link, rates.cpu_rows)
