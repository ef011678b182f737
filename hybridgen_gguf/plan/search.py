"""The fastest placement under byte budgets, with the engine's exact bytes as the judge. Pure.

What the engine takes beyond weights and cache (scratch) is not known before it is asked, so the search is repeated with
that much less until its answer fits. Where KV may lie in two tiers, every number of device cells is a placement of its
own; those numbers are tried in steps that get smaller around the best.
Invariant: what is found fits every device's budget by exact bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..machine.rates import CPU
from ..settings import CELL_STEP, Placement
from .assign import Assignment, Problem, Sizes, search
from .assign import bytes_of as bytes_placed
from .cost import CostModel, ModelWork, Use
from .inputs import Given, depth_of
from .tiers import device_kv, in_tiers
from .types import Draft, MemoryUse, goal_weights

_TRIES = 6  # questions about placements before the search gives up on exactness
_GRID, _GRID_SEVERAL = 16, 6  # numbers of device cells that are tried first; each search over several devices is long
_FINEST = 128  # parts of the context

Budgets = Mapping[str, int]


@dataclass(frozen=True)
class Fast:
    """A draft, and what it was found by. `otherwise`: seconds of the fastest with KV in one memory, where it is not."""

    draft: Draft
    placed: Assignment
    problem: Problem
    otherwise: float | None = None

    @property
    def all_on_device(self) -> bool:
        weights = self.placed.layers == self.problem.n and not self.placed.heavy_on_host
        return weights and self.draft.placement.tiers is None

    @property
    def n_ubatch(self) -> int:
        return self.draft.context.n_ubatch


#: budgets less what is put aside → the fastest there
Find = Callable[[Budgets], Fast]


def one_memory(given: Given, draft: Draft, budgets: Budgets) -> Find:
    """Searches with the cache as the draft has it."""
    problem = problem_of(given, draft, budgets)
    return lambda left: Fast(draft, search(replace(problem, budgets=left)), problem)


def two_tiers(given: Given, draft: Draft, budgets: Budgets) -> Find:
    """Searches over numbers of device cells too."""
    known: dict[int, tuple[Draft, Problem]] = {}

    def tried(cells: int, left: Budgets, below: float) -> Fast:
        if cells not in known:
            tiered = in_tiers(given.limits, draft, cells)
            known[cells] = tiered, problem_of(given, tiered, budgets)
        tiered, problem = known[cells]
        return Fast(tiered, search(replace(problem, budgets=left), below), problem)

    def find(left: Budgets) -> Fast:
        last = (draft.context.n_ctx - 1) // CELL_STEP
        step = max(-(-last // (_GRID if len(budgets) == 1 else _GRID_SEVERAL)), 1)
        finest = max(draft.context.n_ctx // CELL_STEP // _FINEST, 1)
        found: dict[int, Fast] = {}
        best: Fast | None = None
        at, near = 0, [*range(last, -1, -step), 0]  # of equals the most cells on the device: what is free is used
        while best is None or step > finest:
            if best is not None:
                step = max(step // 2, 1)
                near = [min(at + step, last), max(at - step, 0)]
            for n in (n for n in near if n not in found):
                found[n] = tried(n * CELL_STEP, left, math.inf if best is None else best.placed.seconds)
                if best is None or found[n].placed.seconds < best.placed.seconds:
                    at, best = n, found[n]
        return best

    return find


def fastest(given: Given, find: Find, budgets: Budgets, reserve: Mapping[str, int]) -> Fast | None:
    """The placement with the least predicted seconds, by exact bytes; None when the search comes to no end.

    `reserve`: a guess at what the engine takes of each device beyond weights and cache.
    """
    put_aside = dict(reserve)
    best: Fast | None = None
    for _ in range(_TRIES):
        found = find({device: max(budget - put_aside[device], 0) for device, budget in budgets.items()})
        if best is not None and found.placed.seconds >= best.placed.seconds * (1 - 1e-6):
            break
        candidate = replace(found, draft=_with(given, found))
        used = given.bytes_of(candidate.draft)
        estimated = bytes_placed(found.problem, found.placed)
        beyond = {use.device: use.total - estimated.get(use.device, 0) for use in used if use.device != CPU}
        over = excess(used, budgets)
        if not over:
            best = candidate
            if all(beyond.get(device, 0) >= put_aside[device] for device in budgets):
                break
        elif best is not None:
            break
        for device in budgets:  # what a layer adds to scratch memory is not known, so a little is put aside
            margin = budgets[device] >> 8 if over else 0
            put_aside[device] = max(beyond.get(device, 0), 0) + margin
    return best


def excess(used: tuple[MemoryUse, ...], budgets: Budgets) -> dict[str, int]:
    """Bytes above the budget by device; empty when all fits."""
    over = {use.device: use.total - budgets.get(use.device, 0) for use in used if use.device != CPU}
    return {device: size for device, size in over.items() if size > 0}


def problem_of(given: Given, draft: Draft, budgets: Budgets) -> Problem:
    """Sizes and seconds of each layer's parts at each place, for this draft's batches and tiers."""
    work, context = given.work, draft.context
    heavy = [layer.bytes_heavy for layer in work.layers]
    heavy[-1] += 4 * context.n_outputs * work.n_vocab  # logits lie where the output does
    sizes = Sizes(tuple(layer.bytes_mixer for layer in work.layers), (*device_kv(given, draft), 0), tuple(heavy))
    depth = max(depth_of(given.limits, context.n_ctx), 1)
    model = CostModel(given.rates, work, Use(depth, context))
    places = (CPU, *budgets)
    crossing = {device: given.rates.crossing(device) for device in budgets}
    gpu = next((device for device in budgets if given.rates.computes_host_weights(device)), None)
    decode = {place: model.decode(place) for place in places}
    prefill = {place: model.prefill(place, gpu) for place in places}
    per_batch = {device: seconds / min(context.n_ubatch, depth) for device, seconds in crossing.items()}
    answer, prompt = goal_weights(given.limits.goal, depth)
    uses = ((answer, decode, crossing), (prompt, prefill, per_batch))
    return Problem(sizes, budgets, tuple(use for use in uses if use[0]))


def _with(given: Given, found: Fast) -> Draft:
    """The engine's settings for a placement."""
    draft, placed = found.draft, found.placed
    counts = {device: count for device, count in zip(found.problem.budgets, placed.counts, strict=True) if count}
    several = len(found.problem.budgets) > 1 and placed.layers > 0
    placement = replace(
        draft.placement,
        on_host=heavy_names(given.work, placed.heavy_on_host),
        # With several devices their order decides who gets which layers: it is fixed to the order planned for.
        devices=tuple(counts) if several else draft.placement.devices,
        tensor_split=tuple(float(count) for count in counts.values()) if len(counts) > 1 else (),
    )
    return draft.with_placement(placement, placed.layers)


def heavy_names(work: ModelWork, layers: Iterable[int]) -> tuple[str, ...]:
    """Names of all tensors of these layers' heavy parts."""
    return tuple(name for layer in sorted(layers) for name in work.layers[layer].heavy_names)


def heavy_layers(work: ModelWork, placement: Placement) -> frozenset[int]:
    """Layers whose heavy part stays on the host, all of it or some of its tensors; the output is the last."""
    names = frozenset(placement.on_host)
    return frozenset(index for index, layer in enumerate(work.layers) if not names.isdisjoint(layer.heavy_names))
