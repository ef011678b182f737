"""KV in two tiers: how many cells lie on the device, under the bytes that the user gives them. Pure.

Only what `--kv-vram` asks for; the planner does not choose tiers by itself yet. The idea: the HybridGen paper.
Invariant: cells come in the engine's steps, and a context that fits under the bytes has one memory, as in stock.
"""

from __future__ import annotations

from dataclasses import replace

from .errors import UsageError
from .plan_given import Given
from .plan_parts import Plan
from .units import format_size

STEP = 256  # cells; the engine's attention works in blocks of these


def with_tiers(given: Given, plan: Plan) -> Plan:
    """The plan with its device cells, when --kv-vram asks for two tiers. Raises UsageError where that cannot be."""
    limits = given.limits
    if limits.kv_vram is None:
        if limits.kv_ram_type is not None:
            raise UsageError("--kv-ram-type needs --kv-vram", "say how many bytes of KV may lie on the device")
        return plan
    if limits.flash_attention == "off" or not limits.placement.kv_offload:
        other = "-fa off" if limits.flash_attention == "off" else "-nkvo"
        raise UsageError(f"--kv-vram and {other} exclude each other", f"leave out {other}")
    if not given.hardware.devices or limits.placement.devices == ():
        raise UsageError("--kv-vram was given, but there is no device", "leave it out, or see `hgguf engine`")
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
    given.notes.because("kv tiers", f"{cells} cells on the device, {plan.n_ctx - cells} in host memory", why)
    placement = replace(plan.placement, tier_cells=cells, tier_type=limits.kv_ram_type)
    return replace(plan, flash_attention="on", placement=placement)
