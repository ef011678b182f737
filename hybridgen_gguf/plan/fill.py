"""What a placement leaves of a device's budget is filled with a part of a heavy part: of one layer whose FFN or experts
are on the CPU, the `down` matrices go back to the device, or all but those. Pure.

Invariant: a plan that is returned fits the budgets by exact bytes, and no layer changes sides more often than before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .assign import places_of
from .inputs import Given
from .search import Budgets, Fast, excess, patterns_of
from .types import Plan


def with_rest_filled(given: Given, fast: Fast, budgets: Budgets) -> Plan:
    """The plan of `fast`, with what else fits."""
    plan = fast.plan
    used = {use.device: use.total for use in given.bytes_of(plan)}
    places = places_of(fast.problem, fast.placed.counts)
    on_host = fast.placed.heavy_on_host
    parted: dict[int, tuple[str, ...]] = {}
    for device, budget in budgets.items():
        layers = [layer for layer in on_host if places[layer] == device and layer < fast.problem.n - 1]
        room = budget - used.get(device, 0)
        fitting = [(moved, layer, names) for moved, layer, names in _parts(given, layers) if moved <= room]
        if fitting:
            _, layer, names = max(fitting, key=lambda part: (part[0], -part[1]))
            parted[layer] = names
    if not parted:
        return plan
    placement = replace(plan.placement, overrides=patterns_of(given.work, on_host, parted))
    filled = replace(plan, placement=placement)
    if excess(given.bytes_of(filled), budgets):
        return plan
    for layer, names in parted.items():
        why = "fills what is left of the budget"
        given.notes.because("overrides", f"of layer {layer} only {', '.join(names)} on the CPU", why)
    return filled


def _parts(given: Given, layers: list[int]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(bytes that go to the device, layer, names that stay on the CPU)."""
    sizes = {tensor.name: tensor.bytes for tensor in given.shape.file.tensors}
    for layer in layers:
        names = given.work.layers[layer].heavy_names
        down = tuple(name for name in names if name.startswith("ffn_down"))
        other = tuple(name for name in names if name not in down)
        for stays, goes in ((down, other), (other, down)):
            if stays and goes:
                yield sum(sizes.get(f"blk.{layer}.{name}", 0) for name in goes), layer, stays
