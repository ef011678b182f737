"""Where a plan's layers lie: what the user fixed, what the search finds fastest, and why. Pure.

Knows no context and no threads.
Invariant: a plan that is returned fits every device's budget by exact bytes, or the user fixed its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import DoesNotFit, EngineError
from ..machine.rates import CPU
from ..units import format_size
from .assign import Assignment, seconds_of
from .fill import with_rest_filled
from .inputs import Given, depth_of, device_budgets, host_budget, largest
from .search import Fast, excess, fastest, one_memory, two_tiers
from .tiers import described, device_kv, may_choose
from .types import Plan

_LARGER_BATCHES = (1024, 2048)
_WORTH = 1.005  # KV is not parted, batches not enlarged for less; with more, more memory could be predicted slower


def choose_placement(given: Given, plan: Plan) -> Plan:
    """The plan with its layers placed. Raises DoesNotFit where the user's own numbers do not fit."""
    budgets = device_budgets(given.hardware, given.limits)
    if not budgets:
        return _without_device(given, plan)
    limits, fixed = given.limits, given.limits.placement
    free = not (fixed.overrides or fixed.tensor_split or fixed.split_mode != "layer")
    if limits.n_gpu_layers is not None or not free:
        return _layers_by_count(given, plan, budgets)
    first = _fastest(given, plan, budgets)
    if first is None:
        return _layers_by_count(given, plan, budgets)
    larger = [_fastest(given, replace(plan, n_ubatch=size), budgets) for size in _larger_batches(given, first, budgets)]
    found = [first, *(fast for fast in larger if fast is not None)]
    least = min(fast.placed.seconds for fast in found)
    chosen = next(fast for fast in found if fast.placed.seconds <= least * _WORTH)  # smaller ones first
    if chosen.plan.n_ubatch != plan.n_ubatch:
        what = "operations are started" if chosen.all_on_device else "weights on the host cross the link"
        why = f"{what} once for each batch, so larger ones read prompts faster"
        given.notes.instead("n_ubatch", chosen.plan.n_ubatch, why)
    _explain_placement(given, chosen, budgets)
    return _without_scratch(given, with_rest_filled(given, chosen, budgets), budgets)


def _larger_batches(given: Given, first: Fast, budgets: Mapping[str, int]) -> list[int]:
    """Batch sizes worth asking for beside the default's: only prompts gain by them, most where a GPU computes with
    weights that it copies from the host, and each costs questions."""
    limits, plan = given.limits, first.plan
    if limits.n_ubatch is not None or limits.n_batch is not None or limits.goal == "decode":
        return []
    if not any(map(given.rates.computes_host_weights, budgets)):
        return []
    if limits.goal == "mixed" and depth_of(given, plan) <= plan.n_ubatch:
        return []
    sizes = _LARGER_BATCHES if limits.goal == "prompt" else _LARGER_BATCHES[-1:]
    return [size for size in sizes if size <= plan.n_batch]


def _fastest(given: Given, plan: Plan, budgets: Mapping[str, int]) -> Fast | None:
    """The fastest placement for these batches, KV parted where that is clearly faster than keeping it in one memory."""
    scratch = 4 * plan.n_ubatch * (2 * given.shape.n_ff + 4 * given.shape.n_embd)  # a guess
    one = fastest(given, one_memory(given, plan, budgets), budgets, dict.fromkeys(budgets, scratch))
    if (one is not None and one.all_on_device) or not may_choose(given, plan):
        return one
    scratch += 2 * max(device_kv(given, plan), default=0)  # for prompts one layer's rows are joined on the device
    try:
        two = fastest(given, two_tiers(given, plan, budgets), budgets, dict.fromkeys(budgets, scratch))
    except EngineError as error:  # not with this model's heads, this device or this engine
        given.notes.instead("kv tiers", "one memory", error.what)
        return one
    if two is None or not two.placed.layers:
        return one
    if one is not None and not _host_fits(given, two.plan) and _host_fits(given, one.plan):
        return one
    if one is not None and two.placed.seconds * _WORTH >= one.placed.seconds:
        return one
    return replace(two, otherwise=one.placed.seconds if one is not None else None)


def _host_fits(given: Given, plan: Plan) -> bool:
    used = given.bytes_of(plan)
    return sum(use.total for use in used if use.device == CPU) <= host_budget(given.hardware, given.limits)


def _without_device(given: Given, plan: Plan) -> Plan:
    why = "this engine has no GPU backend, or it sees no device"
    limits = given.limits
    if limits.vram is not None:
        raise DoesNotFit(f"--vram was given, but there is no device: {why}", "leave out --vram, or see `hgguf engine`")
    if limits.n_gpu_layers:
        given.notes.warnings.append(f"-ngl {limits.n_gpu_layers} has no effect, nothing is offloaded: {why}")
    given.notes.because("n_gpu_layers", 0, why)
    return plan


def _layers_by_count(given: Given, plan: Plan, budgets: Mapping[str, int]) -> Plan:
    """As many whole layers as the user says or as fit: for what the user fixed and the search does not know."""
    limits, every = given.limits, given.shape.n_layers + 1  # the output counts as a layer

    def fits(layers: int) -> bool:
        return not excess(given.bytes_of(replace(plan, n_gpu_layers=layers)), budgets)

    if limits.n_gpu_layers is not None:
        layers = every if limits.n_gpu_layers < 0 else min(limits.n_gpu_layers, every)
        if limits.vram is not None and layers and not fits(layers):
            best = largest(every, fits)
            raise DoesNotFit(
                f"{layers} layers need more than the --vram of {format_size(limits.vram)}",
                f"{best} layers would fit: -ngl {best}",
                {"n_gpu_layers": best},
            )
        given.notes.because("n_gpu_layers", layers, "set by the user")
        return replace(plan, n_gpu_layers=layers)
    layers = largest(every, fits)
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    given.notes.because("n_gpu_layers", layers, f"{'all' if layers == every else 'as many as'} fit into {room}")
    return _without_scratch(given, replace(plan, n_gpu_layers=layers), budgets)


def _without_scratch(given: Given, plan: Plan, budgets: Mapping[str, int]) -> Plan:
    """With no layer on a device the engine still takes scratch of it, unless it is told to use none."""
    if plan.n_gpu_layers or not excess(given.bytes_of(plan), budgets):
        return plan
    given.notes.because("devices", "none", "not even the engine's scratch memory fits there")
    return replace(plan, placement=replace(plan.placement, devices=()))


def _explain_placement(given: Given, chosen: Fast, budgets: Mapping[str, int]) -> None:
    problem, placed = chosen.problem, chosen.placed
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    basis = "" if given.rates.measured else ", by assumed rates: this machine was not measured"
    none = Assignment((0,) * len(budgets))
    ratio = seconds_of(problem, none) / max(placed.seconds, 1e-12)
    if not placed.layers:
        given.notes.because("n_gpu_layers", 0, f"the CPU alone is fastest within {room}{basis}")
        return
    cells = chosen.plan.placement.tier_cells
    how = "all fits into" if chosen.all_on_device else "fastest within"
    gain = f"{ratio:.1f} times as fast as the CPU alone for the goal '{given.limits.goal}'"
    given.notes.because("n_gpu_layers", placed.layers, f"{how} {room}; {gain}{basis}")
    kept = sorted(placed.heavy_on_host - {problem.n - 1})
    if kept:
        kind = "experts" if given.shape.n_expert else "FFN"
        names = ", ".join(map(str, kept))
        given.notes.because(
            "overrides", f"{kind} of layers {names} on the CPU", "loses the fewest seconds per byte freed"
        )
    if problem.n - 1 in placed.heavy_on_host:
        given.notes.because("overrides", "output on the CPU", "loses the fewest seconds per byte freed")
    if cells is not None and given.limits.kv_vram is None:
        gain = f"{chosen.otherwise / placed.seconds:.2f} times as fast as in one memory; " if chosen.otherwise else ""
        why = f"{gain}the CPU attends to those in host memory while the device attends to its own"
        given.notes.instead("kv tiers", described(chosen.plan.n_ctx, cells), why)
    if len(placed.counts) > 1:
        shares = ", ".join(f"{name} {count}" for name, count in zip(problem.budgets, placed.counts, strict=True))
        given.notes.because("tensor_split", shares, "layers of each device: its speed and memory together")
