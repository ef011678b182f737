"""Placements near one that was planned, for `tune` to measure: Plan → Plans that fit. Pure.

One layer more or less on the device; the FFN (or experts) of one layer more or less on the CPU; both in exchange, since
either frees what the other needs; the cache on the other side; more or fewer cells of a parted cache on the device.
Knows no clock and no engine: what a placement takes is asked. Invariant: a neighbour fits every budget by exact bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..plan import Limits, MemoryUse, Plan
from ..plan.cost import ModelWork
from ..plan.make import heavy_on_host
from ..plan.search import excess, patterns_of
from ..tuned import Place, Setting

Memory = tuple[MemoryUse, ...]
_STEP = 256  # cells, the engine's step
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
        bytes_of: Callable[[Sequence[Plan]], list[Memory]],
    ) -> None:
        self._plan, self._work, self._budgets, self._bytes_of = plan, work, budgets, bytes_of

    def around(self, setting: Setting) -> list[Setting]:
        """Settings that differ from `setting` by one step of its placement, and fit."""
        plans = dict.fromkeys(near(applied(self._plan, setting), self._work))
        return self.fitting([replace(setting, place=Place(p.n_gpu_layers, p.placement, p.n_ctx)) for p in plans])

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
    kv = replace(plan.kv, type_k=setting.type_k, type_v=setting.type_v)
    plan = replace(
        plan,
        threads=setting.threads,
        threads_batch=setting.threads_batch,
        n_batch=setting.n_batch,
        n_ubatch=setting.n_ubatch,
        flash_attention=setting.flash_attention,
        kv=kv,
    )
    if setting.place is None:
        return plan
    return replace(plan, n_gpu_layers=setting.place.n_gpu_layers, placement=setting.place.placement)


def near(plan: Plan, work: ModelWork) -> Iterator[Plan]:
    """Placements one step away, whether they fit or not."""
    layers, kept = plan.n_gpu_layers, heavy_on_host(plan)
    for more_layers, more_kept in _EXCHANGES:
        count = layers + more_layers
        if not 0 <= count <= len(work.layers):
            continue
        on_device = range(len(work.layers) - count, len(work.layers))
        parted = _one_more(kept & set(on_device), on_device, work, more_kept)
        if parted is not None:
            placement = replace(plan.placement, overrides=patterns_of(work, parted))
            yield replace(plan, n_gpu_layers=count, placement=placement)
    place = plan.placement
    if layers and place.tier_cells is None:
        yield replace(plan, placement=replace(place, kv_offload=not place.kv_offload))
    if place.tier_cells is not None:
        step = max(plan.n_ctx // 8 // _STEP, 1) * _STEP
        for cells in (place.tier_cells - step, place.tier_cells + step):
            if 0 < cells < plan.n_ctx:
                yield replace(plan, placement=replace(place, tier_cells=cells))


def _one_more(kept: frozenset[int], on_device: range, work: ModelWork, more: int) -> frozenset[int] | None:
    """`kept` with one layer of the device more or less whose heavy part stays on the CPU; None: there is none."""
    if not more:
        return kept
    if more < 0:
        return kept - {max(kept)} if kept else None
    candidates = [layer for layer in on_device if layer not in kept and work.layers[layer].heavy]
    return kept | {candidates[0]} if candidates else None
