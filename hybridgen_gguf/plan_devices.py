"""Where a plan's layers lie: a search over placements, with the engine's exact bytes as the judge. Pure.

What the engine takes beyond weights and cache (scratch) is not known before it is asked, so the search is repeated with
that much less until its answer fits. Knows no context and no threads.
Invariant: a plan that is returned fits every device's budget by exact bytes, or the user fixed its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .cost import CostModel, ModelWork
from .errors import DoesNotFit
from .placement import Assignment, Problem, Sizes, search, seconds_of
from .placement import bytes_of as bytes_placed
from .plan_given import Given, depth_of, device_budgets, largest, use_of
from .plan_parts import MemoryUse, Plan
from .rates import CPU
from .units import format_size

ANSWER_TOKENS = 256  # of the goal `mixed`, after a prompt of the expected depth
_LARGER_BATCHES = (1024, 2048)
_WORTH = 1.03  # times the least seconds: memory is not spent on less
_TRIES = 5  # questions about placements before the search gives up on exactness


def choose_placement(given: Given, plan: Plan) -> Plan:
    budgets = device_budgets(given.hardware, given.limits)
    if not budgets:
        return _without_device(given, plan)
    limits = given.limits
    fixed = limits.placement
    free = not (fixed.overrides or fixed.tensor_split or fixed.split_mode != "layer")
    if limits.n_gpu_layers is not None or not free:
        return _layers_by_count(given, plan, budgets)
    found = [fast for size in _batches(given, plan, budgets) if (fast := _fastest(given, size, budgets)) is not None]
    if not found:
        return _layers_by_count(given, plan, budgets)
    least = min(placed.seconds for _, placed, _ in found)
    chosen, placed, problem = next(fast for fast in found if fast[1].seconds <= least * _WORTH)  # smaller ones first
    if chosen.n_ubatch != plan.n_ubatch:
        why = "weights on the host cross the link once for each batch, so larger ones read prompts faster"
        given.notes.instead("n_ubatch", chosen.n_ubatch, why)
    _explain_placement(given, problem, placed, budgets)
    return _without_scratch(given, chosen, budgets)


def _batches(given: Given, plan: Plan, budgets: Mapping[str, int]) -> list[Plan]:
    """The plan with each batch size worth asking for: only prompts gain by larger ones, and each costs questions."""
    limits = given.limits
    left_open = limits.n_ubatch is None and limits.n_batch is None
    if limits.goal != "prompt" or not left_open or not any(map(given.rates.computes_host_weights, budgets)):
        return [plan]
    return [replace(plan, n_ubatch=size) for size in (plan.n_ubatch, *_LARGER_BATCHES) if size <= plan.n_batch]


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
        return not _excess(given.bytes_of(replace(plan, n_gpu_layers=layers)), budgets)

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
    if plan.n_gpu_layers or not _excess(given.bytes_of(plan), budgets):
        return plan
    given.notes.because("devices", "none", "not even the engine's scratch memory fits there")
    return replace(plan, placement=replace(plan.placement, devices=()))


def _excess(used: tuple[MemoryUse, ...], budgets: Mapping[str, int]) -> dict[str, int]:
    """Bytes above the budget by device; empty when all fits."""
    over = {use.device: use.total - budgets.get(use.device, 0) for use in used if use.device != CPU}
    return {device: size for device, size in over.items() if size > 0}


def _fastest(given: Given, plan: Plan, budgets: Mapping[str, int]) -> tuple[Plan, Assignment, Problem] | None:
    """The placement with the least predicted seconds, by exact bytes; None when the search comes to no end."""
    problem = _problem(given, plan, budgets)
    reserve = dict.fromkeys(budgets, 4 * plan.n_ubatch * (2 * given.shape.n_ff + 4 * given.shape.n_embd))  # a guess
    best: tuple[Plan, Assignment] | None = None
    for _ in range(_TRIES):
        left = {device: max(budget - reserve[device], 0) for device, budget in budgets.items()}
        placed = search(replace(problem, budgets=left))
        if best is not None and placed.seconds >= best[1].seconds * (1 - 1e-6):
            break
        candidate = _with(given, plan, problem, placed)
        used = given.bytes_of(candidate)
        estimated = bytes_placed(problem, placed)
        beyond = {use.device: use.total - estimated.get(use.device, 0) for use in used if use.device != CPU}
        excess = _excess(used, budgets)
        if not excess:
            best = candidate, placed
            if all(beyond.get(device, 0) >= reserve[device] for device in budgets):
                break
        elif best is not None:
            break
        for device in budgets:  # what a layer adds to scratch memory is not known, so a little is put aside
            margin = budgets[device] >> 8 if excess else 0
            reserve[device] = max(beyond.get(device, 0), 0) + margin if best is None or not excess else reserve[device]
    return None if best is None else (*best, problem)


def _problem(given: Given, plan: Plan, budgets: Mapping[str, int]) -> Problem:
    work, kv = given.work, given.shape.kv_bytes_per_layer(plan.n_ctx, plan.kv.type_k, plan.kv.type_v, plan.n_ubatch)
    heavy = [layer.bytes_heavy for layer in work.layers]
    heavy[-1] += 4 * plan.n_ubatch * work.n_vocab  # the logits of a batch lie where the output does
    sizes = Sizes(tuple(layer.bytes_mixer for layer in work.layers), (*kv, 0), tuple(heavy))
    depth = max(depth_of(given, plan), 1)
    model = CostModel(given.rates, work, use_of(plan, depth))
    places = (CPU, *budgets)
    crossing = {device: given.rates.crossing(device) for device in budgets}
    gpu = next((device for device in budgets if given.rates.computes_host_weights(device)), None)
    writing = {place: model.writing(place) for place in places}
    reading = {place: model.reading(place, gpu) for place in places}
    per_batch = {device: seconds / min(plan.n_ubatch, depth) for device, seconds in crossing.items()}
    weights = {"decode": (1.0, 0.0), "prompt": (0.0, 1.0), "mixed": (float(ANSWER_TOKENS), float(depth))}
    answer, prompt = weights[given.limits.goal]
    uses = ((answer, writing, crossing), (prompt, reading, per_batch))
    # Assumed rates are not good enough to part the cache from its weights.
    return Problem(
        sizes,
        budgets,
        tuple(use for use in uses if use[0]),
        may_keep_cache=given.rates.measured,
        kv_offload=plan.placement.kv_offload,
    )


def _with(given: Given, plan: Plan, problem: Problem, placed: Assignment) -> Plan:
    """The engine's settings for a placement."""
    counts = {device: count for device, count in zip(problem.budgets, placed.counts, strict=True) if count}
    several = len(problem.budgets) > 1 and placed.layers > 0
    placement = replace(
        plan.placement,
        kv_offload=placed.kv_offload,
        overrides=_overrides(given.work, placed.heavy_on_host),
        # With several devices their order decides who gets which layers: it is fixed to the order planned for.
        devices=tuple(counts) if several else plan.placement.devices,
        tensor_split=tuple(float(count) for count in counts.values()) if len(counts) > 1 else (),
    )
    return replace(plan, n_gpu_layers=placed.layers, placement=placement)


def _overrides(work: ModelWork, layers: frozenset[int]) -> tuple[tuple[str, str], ...]:
    """Patterns that keep the heavy tensors of these layers on the CPU, one for each set of tensor names."""
    by_names: dict[tuple[str, ...], list[int]] = {}
    output = len(work.layers) - 1
    for layer in sorted(layers - {output}):
        by_names.setdefault(work.layers[layer].heavy_names, []).append(layer)
    patterns = [rf"blk\.({'|'.join(map(str, numbers))})\.({'|'.join(names)})" for names, numbers in by_names.items()]
    patterns += [rf"^({'|'.join(work.layers[output].heavy_names)})" for _ in layers & {output}]
    return tuple((pattern.replace(".weight", r"\.weight"), CPU) for pattern in patterns)


def _explain_placement(given: Given, problem: Problem, placed: Assignment, budgets: Mapping[str, int]) -> None:
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    basis = "" if given.rates.measured else ", by assumed rates: this machine was not measured"
    none = Assignment((0,) * len(budgets), kv_offload=problem.kv_offload)
    ratio = seconds_of(problem, none) / max(placed.seconds, 1e-12)
    if not placed.layers:
        given.notes.because("n_gpu_layers", 0, f"the CPU alone is fastest within {room}{basis}")
        return
    everything = placed.layers == problem.n and not placed.heavy_on_host and placed.kv_offload
    how = "all fits into" if everything else "fastest within"
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
        given.notes.because(
            "overrides", "output on the CPU", "it and its logits would take the place of several layers"
        )
    if not placed.kv_offload and given.limits.placement.kv_offload:
        given.notes.because(
            "kv_offload", "off", "weights save more seconds per byte of device memory than the KV cache"
        )
    if len(placed.counts) > 1:
        shares = ", ".join(f"{name} {count}" for name, count in zip(problem.budgets, placed.counts, strict=True))
        given.notes.because("tensor_split", shares, "layers of each device: its speed and memory together")
