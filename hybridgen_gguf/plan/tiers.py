"""KV in two tiers: how many cells lie on the device, by --kv-vram or where the planner may choose. Pure.

The idea: the HybridGen paper.
Invariant: cells come in the engine's steps, and a context that fits under the bytes has one memory, as in stock.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UsageError
from ..settings import CELL_STEP, Tiers
from ..units import format_size, round_up
from .inputs import Given, Notes
from .types import Draft, Limits


def with_tiers(given: Given, notes: Notes, draft: Draft) -> Draft:
    """The draft with the device cells that --kv-vram leaves room for. Raises UsageError where two tiers cannot be."""
    limits, context, shape = given.limits, draft.context, given.shape
    if limits.kv_vram is None and limits.kv_ram_type is None:
        return draft
    _check(given)
    if limits.kv_vram is None:
        return draft  # the planner says how many cells lie where
    per_layer = shape.kv_bytes_per_layer(context.n_ctx, context.type_k, context.type_v, context.n_ubatch)
    global_layers = [size for size, layer in zip(per_layer, shape.layers, strict=True) if not layer.window]
    windows = sum(per_layer) - sum(global_layers)  # windowed layers stay on the device
    per_cell = sum(global_layers) / context.n_ctx
    room = max(limits.kv_vram - windows, 0)
    cells = int(room / per_cell / CELL_STEP) * CELL_STEP if per_cell else context.n_ctx
    if cells >= context.n_ctx:
        why = f"all {context.n_ctx} cells fit into --kv-vram {format_size(limits.kv_vram)}"
        notes.because("kv tiers", "one memory", why)
        return draft
    why = f"as many as fit into --kv-vram {format_size(limits.kv_vram)}; the CPU attends to the others"
    notes.because("kv tiers", described(context.n_ctx, cells), why)
    return in_tiers(limits, draft, cells)


def _check(given: Given) -> None:
    limits = given.limits
    flag = "--kv-vram" if limits.kv_vram is not None else "--kv-ram-type"
    if limits.flash_attention == "off" or not limits.placement.kv_offload:
        other = "-fa off" if limits.flash_attention == "off" else "-nkvo"
        raise UsageError(f"{flag} and {other} exclude each other", f"leave out {other}")
    if not given.may_use_devices:
        raise UsageError(f"{flag} was given, but there is no device", "leave it out, or see `hgguf engine`")


def described(n_ctx: int, cells: int) -> str:
    return f"{cells} cells on the device, {n_ctx - cells} in host memory"


def in_tiers(limits: Limits, draft: Draft, cells: int) -> Draft:
    """The draft with so many cells on the device, the others in host memory as the limits say."""
    tiers = Tiers(cells, limits.kv_ram_type, limits.kv_policy, limits.kv_cpu_tokens, limits.kv_share)
    parted = draft.with_placement(replace(draft.placement, tiers=tiers))
    return replace(parted, context=replace(parted.context, flash_attention="on"))


def may_choose(given: Given, draft: Draft) -> bool:
    """Whether the planner may keep KV in two memories: by measured rates alone, and where nothing was fixed against
    it."""
    limits, place = given.limits, draft.placement
    open_ = limits.kv_vram is None and place.tiers is None and place.kv_offload
    able = limits.flash_attention != "off" and not limits.stock_only and draft.context.n_ctx > CELL_STEP
    return open_ and able and given.rates.measured


def device_kv(given: Given, draft: Draft) -> tuple[int, ...]:
    """Bytes of each layer's cache on the device that the layer lies on."""
    context, tiers = draft.context, draft.context.tiers
    sizes = given.shape.kv_bytes_per_layer(context.n_ctx, context.type_k, context.type_v, context.n_ubatch)
    if not draft.placement.kv_offload:
        return (0,) * len(sizes)
    if tiers is None:
        return sizes
    rows = round_up(tiers.cells, CELL_STEP) + 1  # one spare row takes what belongs to the other tier
    return tuple(
        size if layer.window else size * rows // context.n_ctx
        for size, layer in zip(sizes, given.shape.layers, strict=True)
    )
