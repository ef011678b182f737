"""KV in two tiers: how many cells lie on the device, by --kv-vram or where the planner may choose. Pure.

The idea: the HybridGen paper.
Invariant: cells come in the engine's steps, and a context that fits under the bytes has one memory, as in stock.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UsageError
from ..units import format_size
from .inputs import Given
from .types import Plan

STEP = 256  # cells; the engine's attention works in blocks of these


def with_tiers(given: Given, plan: Plan) -> Plan:
    """The plan with the device cells that --kv-vram leaves room for. Raises UsageError where two tiers cannot be."""
    limits = given.limits
    flag = "--kv-vram" if limits.kv_vram is not None else "--kv-ram-type"
    if limits.kv_vram is None and limits.kv_ram_type is None:
        return plan
    if limits.flash_attention == "off" or not limits.placement.kv_offload:
        other = "-fa off" if limits.flash_attention == "off" else "-nkvo"
        raise UsageError(f"{flag} and {other} exclude each other", f"leave out {other}")
    if not given.hardware.devices or limits.placement.devices == ():
        raise UsageError(f"{flag} was given, but there is no device", "leave it out, or see `hgguf engine`")
    if limits.kv_vram is None:
        return plan  # the planner says how many cells lie where
    per_layer = given.shape.kv_bytes_per_layer(plan.n_ctx, plan.kv.type_k, plan.kv.type_v, plan.n_ubatch)
    global_layers = [size for size, layer in zip(per_layer, given.shape.layers, strict=True) if not layer.window]
    windows = sum(per_layer) - sum(global_layers)  # windowed layers stay on the device
    per_cell = sum(global_layers) / plan.n_ctx
    cells = int(max(limits.kv_vram - windows, 0) / per_cell / STEP) * STEP if per_cell else plan.n_ctx
    if cells >= plan.n_ctx:
        why = f"all {plan.n_ctx} cells fit into --kv-vram {format_size(limits.kv_vram)}"
        given.notes.because("kv tiers", "one memory", why)
        return plan
    why = f"as many as fit into --kv-vram {format_size(limits.kv_vram)}; the CPU attends to the others"
    given.notes.because("kv tiers", described(plan.n_ctx, cells), why)
    return in_tiers(plan, cells, limits.kv_ram_type)


def described(n_ctx: int, cells: int) -> str:
    return f"{cells} cells on the device, {n_ctx - cells} in host memory"


def in_tiers(plan: Plan, cells: int, kind: str | None) -> Plan:
    """The plan with so many cells on the device, the others in host memory as `kind`."""
    return replace(plan, flash_attention="on", placement=replace(plan.placement, tier_cells=cells, tier_type=kind))


def may_choose(given: Given, plan: Plan) -> bool:
    """Whether the planner may part the cache: by measured rates alone, and where the user fixed nothing against it."""
    limits = given.limits
    open_ = limits.kv_vram is None and plan.placement.tier_cells is None and plan.placement.kv_offload
    able = limits.flash_attention != "off" and not limits.stock_only and plan.n_ctx > STEP
    return open_ and able and given.rates.measured


def device_kv(given: Given, plan: Plan) -> tuple[int, ...]:
    """Bytes of each layer's cache on the device that the layer lies on."""
    kv, cells = plan.kv, plan.placement.tier_cells
    sizes = given.shape.kv_bytes_per_layer(plan.n_ctx, kv.type_k, kv.type_v, plan.n_ubatch)
    if not plan.placement.kv_offload:
        return (0,) * len(sizes)
    if cells is None or cells >= plan.n_ctx:
        return sizes
    rows = -(-cells // STEP) * STEP + 1  # one spare row takes what belongs to the other tier
    return tuple(
        size if layer.window else size * rows // plan.n_ctx
        for size, layer in zip(sizes, given.shape.layers, strict=True)
    )
