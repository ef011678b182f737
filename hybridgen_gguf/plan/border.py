"""Where attention to host cells is computed: few tokens on the CPU, more on the device after a copy. Pure.

Rates in, a number of tokens and a share of the cells out.

Invariant: without measured rates of both CPU and link nothing is chosen, and the engine's own border stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..machine.rates import CPU
from .cost import Use
from .inputs import Given, Notes
from .types import Draft

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


def with_border(given: Given, notes: Notes, draft: Draft) -> Draft:
    """The draft with its border, where KV lies in two memories and the user (or a saved plan) left it open."""
    tiers, layer = draft.context.tiers, given.shape.attention_layer
    if tiers is None or tiers.cpu_tokens is not None or layer is None:
        return draft
    rates = tier_rates(given, draft)
    if rates is None:
        return draft
    border = cpu_tokens(rates, layer.queries)
    why = f"the CPU attends at {rates.cpu / 1e9:.1f} GB/s, the link copies {rates.link / 1e9:.1f} GB/s"
    what = f"on the CPU up to {border} tokens at once" if border else "on the device, after a copy"
    notes.because("attention to host cells", what, why)
    share = tiers.share
    context = draft.context
    if border and share is None and context.type_k == context.type_v == (tiers.type or context.type_k):
        memory = given.rates.read_gbps(CPU, context.threads) * 1e9
        share = host_share(rates, memory) or None
        if share:
            why = f"memory reads {memory / 1e9:.1f} GB/s, so the link can work beside the CPU"
            notes.because("host cells to the device", f"{share:.0%} of them, while the CPU attends", why)
    return draft.with_placement(replace(draft.placement, tiers=replace(tiers, cpu_tokens=border, share=share)))


def tier_rates(given: Given, draft: Draft) -> TierRates | None:
    """The CPU's and the link's bytes of host KV a second, or None where one of them was not measured."""
    names = draft.placement.devices or given.rates.devices()
    link = next((link for link in given.hardware.links if names and link.device == names[0]), None)
    gbps = link and (link.to_device_pinned_gbps or link.to_device_gbps)
    layer, context = given.shape.attention_layer, draft.context
    if not gbps or layer is None or not given.rates.measured:
        return None
    types = Use(context.n_ctx, context).host_types
    cells = max(context.n_ctx - (context.tiers.cells if context.tiers else 0), 1)
    seconds = given.rates.attention(CPU, layer, types, cells, context.threads, prefill=False)
    return TierRates(cpu=cells * layer.cell_bytes(*types) / seconds, link=gbps * 1e9)
