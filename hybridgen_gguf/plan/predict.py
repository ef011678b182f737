"""Tokens a second of a draft, wherever its tensors lie. Pure.

A layer is a way from place to place: what comes before the attention, the attention itself, its output, the FFN's first
matrices, its last. Each change of places costs a crossing. Knows no memory.
Invariant: for a placement that moves whole parts, the seconds are those that the search counted (cost.total).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..machine.rates import CPU, Product, Rates
from .buffers import layer_devices, placer, used_devices
from .cost import CostModel, LayerWork, ModelWork, PartCost, Use
from .types import Draft, Predicted


@dataclass(frozen=True)
class _Layer:
    """A layer's work, where it lies, and what it costs at each place."""

    work: LayerWork
    device: str
    place: Callable[[str], str]
    costs: Mapping[str, PartCost]

    def home(self, part: Mapping[str, Product]) -> str:
        """Where a part's small operations are: with its products if these lie together, else where the layer does."""
        places = {self.place(name) for name in part}
        return next(iter(places)) if len(places) == 1 else self.device

    def seconds(self) -> float:
        mixer, heavy = self.home(self.work.mixer), self.home(self.work.heavy)
        moved = self._moved(self.work.mixer, mixer) + self._moved(self.work.heavy, heavy)
        return self.costs[mixer].mixer + self.costs[self.device].cache + self.costs[heavy].heavy + moved

    def _moved(self, part: Mapping[str, Product], home: str) -> float:
        """Seconds more for those products of a part that do not lie at its home."""
        away = {name: place for name in part if (place := self.place(name)) != home}
        return sum(self.costs[to].tensors[name] - self.costs[home].tensors[name] for name, to in away.items())

    def way(self) -> Iterator[set[str]]:
        """Places of each stage, in the order of the graph."""
        after = [name for name in self.work.mixer if "attn_out" in name or "_out." in name]
        late = [name for name in self.work.mixer if "ffn_" in name]
        last = [name for name in self.work.heavy if "ffn_down" in name]
        first = [name for name in self.work.mixer if name not in (*after, *late)]
        yield {self.home(self.work.mixer), *map(self.place, first)}
        if self.work.kv:
            yield {self.device}
        for names in (after, late, [name for name in self.work.heavy if name not in last], last):
            yield set(map(self.place, names))


def predict(rates: Rates, work: ModelWork, draft: Draft, depth: int) -> Predicted | None:
    """Tokens a second of a draft, or None where the machine was not measured, or the engine splits single matrices."""
    free = rates.free()
    layers = layer_devices(draft, len(work.layers) - 1, free)
    devices = used_devices(draft.placement, free) if draft.model.n_gpu_layers else ()
    if layers is None or not rates.measured:
        return None
    place = placer(draft.placement, layers, rates.buffer_types())
    used = {CPU, *devices, *(place(name) for layer in work.layers for name in (*layer.mixer, *layer.heavy))}
    if not all(map(rates.is_measured, used)):
        return None
    model = CostModel(rates, work, Use(max(depth, 1), draft.context))
    gpu = next((device for device in devices if rates.computes_host_weights(device)), None)
    batch = min(draft.context.n_ubatch, max(depth, 1))
    crossing = {device: rates.crossing(device) for device in used - {CPU}}
    per_batch = {device: seconds / batch for device, seconds in crossing.items()}

    def seconds(costs: Mapping[str, list[PartCost]], crossings: Mapping[str, float]) -> float:
        found = [
            _Layer(layer, device, place, {at: costs[at][index] for at in used})
            for index, (layer, device) in enumerate(zip(work.layers, layers, strict=True))
        ]
        return sum(layer.seconds() for layer in found) + _crossed(found, crossings)

    answer = seconds({at: model.decode(at) for at in used}, crossing) + model.fixed
    prompt = seconds({at: model.prefill(at, gpu) for at in used}, per_batch) + model.fixed / batch
    return Predicted(round(1 / answer, 2), round(1 / prompt, 2), depth)


def _crossed(layers: Sequence[_Layer], crossings: Mapping[str, float]) -> float:
    """Seconds of all changes of places, from the CPU to the CPU."""
    seconds, at = 0.0, CPU
    stages = [stage for layer in layers for stage in layer.way()]
    for stage in [*stages, {CPU}]:
        for place in sorted(stage, key=lambda place: (place != at, place)):
            if place != at:
                seconds += crossings.get(at, 0.0) + crossings.get(place, 0.0)
            at = place
    return seconds
