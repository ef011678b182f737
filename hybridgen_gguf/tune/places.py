"""Placements near one that was planned, for `tune` to measure: Draft → Drafts that fit. Pure.

One layer more or less on the device; the FFN (or experts) of one layer more or less on the CPU; both in exchange, since
either frees what the other needs; the cache on the other side; of KV in two memories more or fewer device cells.
Knows no clock and no engine: what a placement takes is asked. Invariant: a neighbour fits every budget by exact bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from ..plan import Draft, Limits, MemoryUse, Plan
from ..plan.cost import ModelWork
from ..plan.search import excess, heavy_layers, heavy_names
from ..settings import CELL_STEP
from ..tuned import Place, Setting

Memory = tuple[MemoryUse, ...]
_EXCHANGES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))  # layers on the device, FFNs on the CPU


class Places:
    """Neighbours of settings. `bytes_of`: what each of some plans takes; `budgets`: of each device and of the "CPU".

    Several plans are asked about at once, since nothing may be open meanwhile (a device's memory is shared, and an RPC
    server answers one client at a time).
    """

    def __init__(
        self,
        plan: Plan,
        work: ModelWork,
        budgets: Mapping[str, int],
        bytes_of: Callable[[Sequence[Draft]], list[Memory]],
    ) -> None:
        self._plan, self._work, self._budgets, self._bytes_of = plan, work, budgets, bytes_of

    def around(self, setting: Setting) -> list[Setting]:
        """Settings that differ from `setting` by one step of its placement, and fit."""
        plans = dict.fromkeys(near(applied(self._plan, setting), self._work))
        return self.fitting([replace(setting, place=Place.of(plan)) for plan in plans])

    def fitting(self, settings: list[Setting]) -> list[Setting]:
        """Those of `settings` that fit."""
        plans = [applied(self._plan, setting) for setting in settings]
        return [s for s, used in zip(settings, self._bytes_of(plans), strict=True) if self._fits(used)]

    def _fits(self, used: Memory) -> bool:
        host = sum(use.total for use in used if use.device == "CPU")
        return not excess(used, self._budgets) and host <= self._budgets["CPU"]


def may_vary(limits: Limits, plan: Plan) -> bool:
    """Whether the user left the placement open, and there is one: with several devices the split is the planner's."""
    fixed = limits.placement
    left_open = limits.n_gpu_layers is None and not (fixed.overrides or fixed.tensor_split) and limits.kv_vram is None
    return left_open and fixed.split_mode == "layer" and not plan.placement.tensor_split


def applied(plan: Plan, setting: Setting) -> Plan:
    """The plan with what a setting changes."""
    changes = {field.name: getattr(setting, field.name) for field in fields(setting) if field.name != "place"}
    plan = replace(plan, context=replace(plan.context, **changes))
    if setting.place is None:
        return plan
    return plan.with_placement(setting.place.placement, setting.place.n_gpu_layers)


def near(draft: Draft, work: ModelWork) -> Iterator[Draft]:
    """Placements one step away, whether they fit or not."""
    place, n_ctx, layers = draft.placement, draft.context.n_ctx, draft.model.n_gpu_layers
    kept = heavy_layers(work, place)
    for more_layers, more_kept in _EXCHANGES:
        count = layers + more_layers
        if not 0 <= count <= len(work.layers):
            continue
        on_device = range(len(work.layers) - count, len(work.layers))
        parted = _one_more(kept & set(on_device), on_device, work, more_kept)
        if parted is not None:
            yield draft.with_placement(replace(place, on_host=heavy_names(work, parted)), count)
    if layers and place.tiers is None:
        yield draft.with_placement(replace(place, kv_offload=not place.kv_offload))
    if place.tiers is not None:
        step = max(n_ctx // 8 // CELL_STEP, 1) * CELL_STEP
        for cells in (place.tiers.cells - step, place.tiers.cells + step):
            if 0 < cells < n_ctx:
                yield draft.with_placement(replace(place, tiers=replace(place.tiers, cells=cells)))


def _one_more(kept: frozenset[int], on_device: range, work: ModelWork, more: int) -> frozenset[int] | None:
    """`kept` with one layer of the device more or less whose heavy part stays on the CPU; None: there is none."""
    if not more:
        return kept
    if more < 0:
        return kept - {max(kept)} if kept else None
    candidates = [layer for layer in on_device if layer not in kept and work.layers[layer].heavy]
    return kept | {candidates[0]} if candidates else None
