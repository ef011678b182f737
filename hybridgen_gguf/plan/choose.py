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
from .inputs import Given, Notes, depth_of, device_budgets, host_budget, largest
from .search import Fast, excess, fastest, one_memory, two_tiers
from .tiers import described, device_kv, may_choose
from .types import Draft

_LARGER_BATCHES = (1024, 2048)
# Least predicted gain for keeping KV in two memories or enlarging batches. A higher threshold could make a
# larger budget look slower.
_WORTH = 1.005


def choose_placement(given: Given, notes: Notes, draft: Draft) -> Draft:
    """The draft with its layers placed. Raises DoesNotFit where the user's own numbers do not fit."""
    limits, fixed = given.limits, given.limits.placement
    if limits.vram == 0:
        return _cpu_alone(given, notes, draft)
    budgets = device_budgets(given.hardware, limits)
    if not budgets:
        return _without_device(given, notes, draft)
    free = not (fixed.overrides or fixed.tensor_split or fixed.split_mode != "layer")
    if limits.n_gpu_layers is not None or not free:
        return _layers_by_count(given, notes, draft, budgets)
    first = _fastest(given, notes, draft, budgets)
    if first is None:
        return _layers_by_count(given, notes, draft, budgets)
    sizes = _larger_batches(given, first, budgets)
    larger = [_fastest(given, notes, draft.with_batch(size), budgets) for size in sizes]
    found = [first, *(fast for fast in larger if fast is not None)]
    least = min(fast.placed.seconds for fast in found)
    chosen = next(fast for fast in found if fast.placed.seconds <= least * _WORTH)  # smaller ones first
    if chosen.n_ubatch != draft.context.n_ubatch:
        what = "operations are started" if chosen.all_on_device else "weights on the host cross the link"
        why = f"{what} once for each batch, so larger ones read prompts faster"
        notes.instead("n_ubatch", chosen.n_ubatch, why)
    _explain_placement(given, notes, chosen, budgets)
    return _without_scratch(given, notes, with_rest_filled(given, notes, chosen, budgets), budgets)


def _larger_batches(given: Given, first: Fast, budgets: Mapping[str, int]) -> list[int]:
    """Batch sizes worth asking for beside the default's: only prompts gain by them, most where a GPU computes with
    weights that it copies from the host, and each costs questions."""
    limits, context = given.limits, first.draft.context
    if limits.n_ubatch is not None or limits.n_batch is not None or limits.goal == "decode":
        return []
    if not any(map(given.rates.computes_host_weights, budgets)):
        return []
    if limits.goal == "mixed" and depth_of(limits, context.n_ctx) <= context.n_ubatch:
        return []
    sizes = _LARGER_BATCHES if limits.goal == "prompt" else _LARGER_BATCHES[-1:]
    return [size for size in sizes if size <= context.n_batch]


def _fastest(given: Given, notes: Notes, draft: Draft, budgets: Mapping[str, int]) -> Fast | None:
    """The fastest placement for these batches, with KV in two memories where that is clearly faster than in one."""
    scratch = 4 * draft.context.n_ubatch * (2 * given.shape.n_ff + 4 * given.shape.n_embd)  # a guess
    one = fastest(given, one_memory(given, draft, budgets), budgets, dict.fromkeys(budgets, scratch))
    if (one is not None and one.all_on_device) or not may_choose(given, draft):
        return one
    scratch += 2 * max(device_kv(given, draft), default=0)  # for prompts one layer's rows are joined on the device
    try:
        two = fastest(given, two_tiers(given, draft, budgets), budgets, dict.fromkeys(budgets, scratch))
    except EngineError as error:  # not with this model's heads, this device or this engine
        notes.instead("kv tiers", "one memory", error.what)
        return one
    if two is None or not two.placed.layers:
        return one
    if one is not None and not _host_fits(given, two.draft) and _host_fits(given, one.draft):
        return one
    if one is not None and two.placed.seconds * _WORTH >= one.placed.seconds:
        return one
    return replace(two, otherwise=one.placed.seconds if one is not None else None)


def _host_fits(given: Given, draft: Draft) -> bool:
    used = given.bytes_of(draft)
    return sum(use.total for use in used if use.device == CPU) <= host_budget(given.hardware, given.limits)


def _cpu_alone(given: Given, notes: Notes, draft: Draft) -> Draft:
    """--vram 0: no layer and no scratch on a device."""
    if given.limits.n_gpu_layers:
        what = f"-ngl {given.limits.n_gpu_layers} wants layers on a device, and --vram 0 allows it no memory"
        raise DoesNotFit(what, "leave out one of them", {"n_gpu_layers": 0})
    notes.because("n_gpu_layers", 0, "--vram 0: the CPU alone")
    return draft.with_placement(replace(draft.placement, devices=())) if given.hardware.devices else draft


def _without_device(given: Given, notes: Notes, draft: Draft) -> Draft:
    why = "this engine has no GPU backend, or it sees no device"
    limits = given.limits
    if limits.vram is not None:
        raise DoesNotFit(f"--vram was given, but there is no device: {why}", "leave out --vram, or see `hgguf engine`")
    if limits.n_gpu_layers:
        notes.warnings.append(f"-ngl {limits.n_gpu_layers} has no effect, nothing is offloaded: {why}")
    notes.because("n_gpu_layers", 0, why)
    return draft


def _layers_by_count(given: Given, notes: Notes, draft: Draft, budgets: Mapping[str, int]) -> Draft:
    """As many whole layers as the user says or as fit: for what the user fixed and the search does not know."""
    limits, every = given.limits, given.shape.n_layers + 1  # the output counts as a layer

    def fits(layers: int) -> bool:
        return not excess(given.bytes_of(draft.with_layers(layers)), budgets)

    if limits.n_gpu_layers is not None:
        layers = every if limits.n_gpu_layers < 0 else min(limits.n_gpu_layers, every)
        if limits.vram is not None and layers and not fits(layers):
            best = largest(every, fits)
            raise DoesNotFit(
                f"{layers} layers need more than the --vram of {format_size(limits.vram)}",
                f"{best} layers would fit: -ngl {best}",
                {"n_gpu_layers": best},
            )
        notes.because("n_gpu_layers", layers, "set by the user")
        return draft.with_layers(layers)
    layers = largest(every, fits)
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    notes.because("n_gpu_layers", layers, f"{'all' if layers == every else 'as many as'} fit into {room}")
    return _without_scratch(given, notes, draft.with_layers(layers), budgets)


def _without_scratch(given: Given, notes: Notes, draft: Draft, budgets: Mapping[str, int]) -> Draft:
    """With no layer on a device the engine still takes scratch of it, unless it is told to use none."""
    if draft.model.n_gpu_layers or not excess(given.bytes_of(draft), budgets):
        return draft
    notes.because("devices", "none", "not even the engine's scratch memory fits there")
    return draft.with_placement(replace(draft.placement, devices=()))


def _explain_placement(given: Given, notes: Notes, chosen: Fast, budgets: Mapping[str, int]) -> None:
    problem, placed = chosen.problem, chosen.placed
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    basis = "" if given.rates.measured else ", by assumed rates: this machine was not measured"
    if not placed.layers:
        notes.because("n_gpu_layers", 0, f"the CPU alone is fastest within {room}{basis}")
        return
    none = Assignment((0,) * len(budgets))
    ratio = seconds_of(problem, none) / max(placed.seconds, 1e-12)
    how = "all fits into" if chosen.all_on_device else "fastest within"
    gain = f"{ratio:.1f} times as fast as the CPU alone for the goal '{given.limits.goal}'"
    notes.because("n_gpu_layers", placed.layers, f"{how} {room}; {gain}{basis}")
    _explain_host(given, notes, chosen)
    if len(placed.counts) > 1:
        shares = ", ".join(f"{name} {count}" for name, count in zip(problem.budgets, placed.counts, strict=True))
        notes.because("tensor_split", shares, "layers of each device: its speed and memory together")


def _explain_host(given: Given, notes: Notes, chosen: Fast) -> None:
    """What stays in host memory though its layer is on a device."""
    problem, placed, tiers = chosen.problem, chosen.placed, chosen.draft.placement.tiers
    kept = sorted(placed.heavy_on_host - {problem.n - 1})
    kind = "experts" if given.shape.n_expert else "FFN"
    parts = [f"{kind} of layers {', '.join(map(str, kept))} on the CPU"] if kept else []
    parts += ["output on the CPU"] if problem.n - 1 in placed.heavy_on_host else []
    for part in parts:
        notes.because("overrides", part, "loses the fewest seconds per byte freed")
    if tiers is not None and given.limits.kv_vram is None:
        gain = f"{chosen.otherwise / placed.seconds:.2f} times as fast as in one memory; " if chosen.otherwise else ""
        why = f"{gain}the CPU attends to those in host memory while the device attends to its own"
        notes.instead("kv tiers", described(chosen.draft.context.n_ctx, tiers.cells), why)
