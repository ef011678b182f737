"""Where attention to host cells is computed: few tokens on the CPU, more on the device after a copy. Pure.

Rates in, a number of tokens and a share of the cells out.

Invariant: without measured rates of both CPU and link nothing is chosen, and the engine's own border stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..machine.rates import CPU
from ..model_file.types import row_bytes
from .inputs import Given, use_of
from .types import Plan

DEFAULT_BORDER = 8  # the engine's own, where nothing was measured
_LEAST_SHARE = 0.1  # below, joining the rows on the device costs about as much as it saves


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


def host_share(rates: TierRates, memory: float) -> float:
    """The part of the host cells that the link carries while the CPU attends to the others; 0 where it is not worth it.

    Both read the same memory, `memory` bytes a second: the link gets what the CPU leaves. In steps of a twentieth.
    """
    link = min(rates.link, memory - rates.cpu)
    share = link / (rates.cpu + link) if link > 0 and rates.cpu > 0 else 0.0
    return int(share * 20) / 20 if share >= _LEAST_SHARE else 0.0


def with_border(given: Given, plan: Plan) -> Plan:
    """The plan with its border, where KV lies in two memories and the user (or a saved plan) left it open."""
    place = plan.placement
    if place.tier_cells is None or place.tier_cells >= plan.n_ctx or place.tier_cpu_tokens is not None:
        return plan
    rates = tier_rates(given, plan)
    if rates is None:
        return plan
    layer = next(layer for layer in given.shape.layers if layer.n_head_kv and not layer.window)
    border = cpu_tokens(rates, max(layer.n_head // layer.n_head_kv, 1))
    why = f"the CPU attends at {rates.cpu / 1e9:.1f} GB/s, the link copies {rates.link / 1e9:.1f} GB/s"
    what = f"on the CPU up to {border} tokens at once" if border else "on the device, after a copy"
    given.notes.because("attention to host cells", what, why)
    share = None
    if border and place.tier_share is None and plan.kv.type_k == plan.kv.type_v == (place.tier_type or plan.kv.type_k):
        memory = given.rates.read_gbps(CPU, plan.threads) * 1e9
        share = host_share(rates, memory) or None
        if share:
            why = f"memory reads {memory / 1e9:.1f} GB/s, so the link can work beside the CPU"
            given.notes.because("host cells to the device", f"{share:.0%} of them, while the CPU attends", why)
    share = place.tier_share if share is None else share
    return replace(plan, placement=replace(place, tier_cpu_tokens=border, tier_share=share))


def tier_rates(given: Given, plan: Plan) -> TierRates | None:
    """The CPU's and the link's bytes of host KV a second, or None where one of them was not measured."""
    names = plan.placement.devices or given.rates.devices()
    link = next((link for link in given.hardware.links if names and link.device == names[0]), None)
    gbps = link and (link.to_device_pinned_gbps or link.to_device_gbps)
    layer = next((layer for layer in given.shape.layers if layer.n_head_kv and not layer.window), None)
    if not gbps or layer is None or not given.rates.measured:
        return None
    use = use_of(plan, plan.n_ctx).host
    cells = max(plan.n_ctx - (plan.placement.tier_cells or 0), 1)
    stored = cells * (
        row_bytes(use.type_k, layer.n_head_kv * layer.head_k) + row_bytes(use.type_v, layer.n_head_kv * layer.head_v)
    )
    seconds = given.rates.attention(CPU, layer, use, cells, plan.threads, reading=False)
    return TierRates(cpu=stored / seconds, link=gbps * 1e9)
