"""Uses up leftover device memory: moves part of one FFN on the CPU (`down`, or the rest) back to its device. Pure.

Invariant: a draft that is returned fits the budgets by exact bytes, and no layer changes sides more often than before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .assign import places_of
from .inputs import Given, Notes
from .search import Budgets, Fast, excess
from .types import Draft


def with_rest_filled(given: Given, notes: Notes, fast: Fast, budgets: Budgets) -> Draft:
    """The draft of `fast`, with what else fits."""
    draft = fast.draft
    used = {use.device: use.total for use in given.bytes_of(draft)}
    places = places_of(fast.problem, fast.placed.counts)
    moved: dict[int, tuple[str, ...]] = {}
    for device, budget in budgets.items():
        layers = [i for i in fast.placed.heavy_on_host if places[i] == device and i < fast.problem.n - 1]
        room = budget - used.get(device, 0)
        fitting = [(size, layer, names) for size, layer, names in _parts(given, layers) if size <= room]
        if fitting:
            _, layer, names = max(fitting, key=lambda part: (part[0], -part[1]))
            moved[layer] = names
    if not moved:
        return draft
    gone = frozenset(name for names in moved.values() for name in names)
    on_host = tuple(name for name in draft.placement.on_host if name not in gone)
    filled = draft.with_placement(replace(draft.placement, on_host=on_host))
    if excess(given.bytes_of(filled), budgets):
        return draft
    for layer in moved:
        stay = ", ".join(name.split(".", 2)[2] for name in on_host if name.startswith(f"blk.{layer}."))
        notes.because("overrides", f"of layer {layer} only {stay} on the CPU", "fills what is left of the budget")
    return filled


def _parts(given: Given, layers: list[int]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(bytes that go to the device, layer, names of the tensors that go)."""
    sizes = {tensor.name: tensor.bytes for tensor in given.shape.file.tensors}
    for layer in layers:
        names = given.work.layers[layer].heavy_names
        down = tuple(name for name in names if name.startswith(f"blk.{layer}.ffn_down"))
        other = tuple(name for name in names if name not in down)
        for stays, goes in ((down, other), (other, down)):
            if stays and goes:
                yield sum(sizes.get(name, 0) for name in goes), layer, goes
