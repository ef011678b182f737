"""Which layers lie on which device, so that predicted seconds are least under byte budgets. Pure arithmetic.

Layers (the output is the last) lie on the devices from the end backwards, each device a contiguous range in the
engine's order, as the engine places them; of a layer on a device the heavy part (FFN or experts) may stay on the CPU.
Where a budget is too small, those heavy parts leave that together lose the fewest seconds. Every number of layers is
tried, and every way to share them among the devices while those are few.
Knows no engine and no file. Invariant: a placement that is returned fits the budgets by the bytes given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..machine.rates import CPU
from .cost import PartCost, total

# Exhaustive search up to this many combinations of FFNs; above it, greedy by seconds lost per byte.
_MOST_WAYS = 4096
_MOST_SHARES = 3000  # ways to share layers out: all of them up to 65 layers on two devices and 23 on three
_EXCHANGES = 64


@dataclass(frozen=True)
class Sizes:
    """Bytes of each layer's parts, the output last."""

    mixer: tuple[int, ...]
    cache: tuple[int, ...]
    heavy: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be placed, on what.

    `budgets`: device → bytes, in the engine's order. `uses`: (weight, seconds by place, price of a crossing by device)
    for each kind of work that counts. `may_split`: heavy parts may leave.
    """

    sizes: Sizes
    budgets: Mapping[str, int]
    uses: tuple[tuple[float, dict[str, list[PartCost]], dict[str, float]], ...]
    may_split: bool = True

    @property
    def n(self) -> int:
        return len(self.sizes.mixer)


@dataclass(frozen=True)
class Assignment:
    """`counts`: layers of each device, in order; `heavy_on_host`: device layers whose heavy part is on the CPU."""

    counts: tuple[int, ...]
    heavy_on_host: frozenset[int] = frozenset()
    seconds: float = field(default=0.0, compare=False)

    @property
    def layers(self) -> int:
        """Layers on devices, the output included: the engine's n_gpu_layers."""
        return sum(self.counts)


def places_of(problem: Problem, counts: Sequence[int]) -> list[str]:
    """The place of each layer."""
    places = [CPU] * (problem.n - sum(counts))
    for device, count in zip(problem.budgets, counts, strict=True):
        places += [device] * count
    return places


def bytes_of(problem: Problem, placement: Assignment) -> dict[str, int]:
    """Bytes of weights and cache on each device."""
    used = dict.fromkeys(problem.budgets, 0)
    for index, place in enumerate(places_of(problem, placement.counts)):
        if place != CPU:
            used[place] += _layer_bytes(problem, index)
            used[place] -= problem.sizes.heavy[index] if index in placement.heavy_on_host else 0
    return used


def fits(problem: Problem, placement: Assignment) -> bool:
    used = bytes_of(problem, placement)
    return all(used[device] <= budget for device, budget in problem.budgets.items())


def seconds_of(problem: Problem, placement: Assignment) -> float:
    """Weighted seconds of all uses."""
    places = places_of(problem, placement.counts)
    return sum(
        weight * total(costs, places, placement.heavy_on_host, crossings) for weight, costs, crossings in problem.uses
    )


def search(problem: Problem, below: float = math.inf) -> Assignment:
    """The best placement. With no device, or budgets too small for anything, all layers stay on the CPU.

    `below`: placements that take as many seconds are of no use; where all do, the answer's seconds are infinite.
    """
    best: Assignment | None = None
    least = _Least(problem)
    bounds = [(least.seconds(candidate), candidate) for candidate in _candidates(problem)]
    for bound, candidate in sorted(bounds, key=lambda pair: pair[0]):
        if bound >= below:
            break
        shed = _shed(problem, candidate)
        timed = None if shed is None else _timed(problem, shed)
        if timed is not None and timed.seconds < below:
            best, below = timed, timed.seconds
    if best is None:
        return Assignment((0,) * len(problem.budgets), seconds=math.inf)
    return _polished(problem, best)


class _Least:
    """A bound below the seconds of a placement, from sums made once: a search asks for thousands.

    What leaves a device costs at least its bytes at the fewest seconds per byte that any heavy part has there.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._devices = problem, tuple(problem.budgets)
        self._sums: dict[str, list[float]] = {}
        for place in (CPU, *problem.budgets):
            values = [0.0] * problem.n
            for weight, costs, _ in problem.uses:
                for i, cost in enumerate(costs[place]):
                    values[i] += weight * (cost.mixer + cost.cache + min(cost.heavy, costs[CPU][i].heavy))
            self._sums[place] = _running(values)
        self._bytes = _running([_layer_bytes(problem, i) for i in range(problem.n)])
        self._heavy = _running(problem.sizes.heavy if problem.may_split else [0] * problem.n)
        self._per_byte = {device: self._fewest(device) for device in self._devices}

    def _fewest(self, device: str) -> float:
        return min(
            (
                sum(w * max(costs[CPU][i].heavy - costs[device][i].heavy, 0.0) for w, costs, _ in self._problem.uses)
                / size
                for i, size in enumerate(self._problem.sizes.heavy)
                if size
            ),
            default=0.0,
        )

    def seconds(self, placement: Assignment) -> float:
        """Infinite where even without all heavy parts a device's budget is too small."""
        start = self._problem.n - placement.layers
        seconds = self._sums[CPU][start]
        for device, count in zip(self._devices, placement.counts, strict=True):
            end = start + count
            over = self._bytes[end] - self._bytes[start] - self._problem.budgets[device]
            if over > self._heavy[end] - self._heavy[start]:
                return math.inf
            sums = self._sums[device]
            seconds += sums[end] - sums[start] + max(over, 0) * self._per_byte[device]
            start = end
        return seconds


def _running(values: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(values)]


def _timed(problem: Problem, placement: Assignment) -> Assignment:
    seconds = seconds_of(problem, placement)
    return Assignment(placement.counts, placement.heavy_on_host, seconds)


def _candidates(problem: Problem) -> Iterator[Assignment]:
    """Every number of layers, shared out to the devices in the order of their speed."""
    yield Assignment(tuple(0 for _ in problem.budgets))
    for layers in range(1, problem.n + 1) if problem.budgets else ():
        for counts in _shares(problem, layers):
            yield Assignment(counts)


def _shares(problem: Problem, layers: int) -> Iterator[tuple[int, ...]]:
    """Ways to share `layers` out: all of them, or with many devices and layers those in steps of a few layers."""
    devices, step = len(problem.budgets), 1
    while math.comb(problem.n // step + devices, devices) > _MOST_SHARES:
        step += 1

    def shared(left: int, among: int) -> Iterator[tuple[int, ...]]:
        if among == 1:
            yield (left,)
            return
        for count in range(0, left + 1, step):
            for others in shared(left - count, among - 1):
                yield (count, *others)

    return shared(layers, devices)


def _layer_bytes(problem: Problem, index: int) -> int:
    sizes = problem.sizes
    return sizes.mixer[index] + sizes.heavy[index] + sizes.cache[index]


def _loss(problem: Problem, index: int, places: Sequence[str]) -> float:
    """Seconds lost when the heavy part of this layer lies on the CPU instead."""
    device = places[index]
    # At the end of a device's range the way leads over the CPU in any case.
    crossed = 2 if index + 1 < problem.n and places[index + 1] == device else 0
    return sum(
        weight * (costs[CPU][index].heavy - costs[device][index].heavy + crossed * crossings.get(device, 0.0))
        for weight, costs, crossings in problem.uses
    )


def _shed(problem: Problem, placement: Assignment) -> Assignment | None:
    """Moves heavy parts to the CPU until each device fits, losing the fewest seconds; None if that is not enough."""
    used = bytes_of(problem, placement)
    over = {device: used[device] - budget for device, budget in problem.budgets.items()}
    if all(excess <= 0 for excess in over.values()):
        return placement
    if not problem.may_split:
        return None
    places = places_of(problem, placement.counts)
    moved: set[int] = set()
    for device, excess in over.items():
        movable = [i for i, place in enumerate(places) if place == device and problem.sizes.heavy[i]]
        if excess > 0:
            chosen = _least_loss(
                [(problem.sizes.heavy[i], max(_loss(problem, i, places), 0.0), i) for i in movable], excess
            )
            if chosen is None:
                return None
            moved.update(chosen)
    return Assignment(placement.counts, frozenset(moved))


def _least_loss(parts: list[tuple[int, float, int]], need: int) -> list[int] | None:
    """Of `parts` (bytes, seconds lost, name) those that free `need` bytes at the least loss; None: all are too few."""
    if sum(size for size, _, _ in parts) < need:
        return None
    kinds: dict[tuple[int, float], list[int]] = {}
    for size, loss, name in parts:
        kinds.setdefault((size, loss), []).append(name)
    groups = sorted(kinds.items(), key=lambda kind: len(kind[1]))
    ways = math.prod(len(names) + 1 for _, names in groups[:-1])
    if ways <= _MOST_WAYS:
        counts = _best_counts([(size, loss, len(names)) for (size, loss), names in groups], need)
        return [name for count, (_, names) in zip(counts, groups, strict=True) for name in names[:count]]
    return _by_density(parts, need)


def _best_counts(groups: list[tuple[int, float, int]], need: int) -> tuple[int, ...]:
    """How many to take of each group of alike parts (bytes, seconds, how many); all ways but the last group's, which
    must fill the rest."""
    *others, (size, loss, most) = groups
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for counts in itertools.product(*(range(count + 1) for _, _, count in others)):
        left = need - sum(n * s for n, (s, _, _) in zip(counts, others, strict=True))
        last = max(-(-left // size), 0)
        if last <= most:
            lost = last * loss + sum(n * seconds for n, (_, seconds, _) in zip(counts, others, strict=True))
            best = min(best, (lost, (*counts, last)))
    return best[1]


def _by_density(parts: list[tuple[int, float, int]], need: int) -> list[int]:
    """The fewest seconds per byte first; then those go back that were not needed after all, the most seconds first."""
    taken: list[tuple[int, float, int]] = []
    left = need
    for part in sorted(parts, key=lambda part: (part[1] / part[0], part[2])):
        if left <= 0:
            break
        taken.append(part)
        left -= part[0]
    for part in sorted(taken, key=lambda part: -part[1]):
        if left + part[0] <= 0:
            left += part[0]
            taken.remove(part)
    return [name for _, _, name in taken]


def _polished(problem: Problem, placement: Assignment) -> Assignment:
    """For three devices and more: moves one layer from a device to another while that saves time."""
    best = placement
    for _ in range(_EXCHANGES if len(problem.budgets) > 2 else 0):
        near = [_timed(problem, shed) for shed in _neighbours(problem, best)]
        better = min(near, key=lambda candidate: candidate.seconds, default=best)
        if better.seconds >= best.seconds * (1 - 1e-9):
            break
        best = better
    return best


def _neighbours(problem: Problem, placement: Assignment) -> Iterator[Assignment]:
    for source, target in itertools.permutations(range(len(placement.counts)), 2):
        if placement.counts[source]:
            counts = list(placement.counts)
            counts[source] -= 1
            counts[target] += 1
            shed = _shed(problem, Assignment(tuple(counts)))
            if shed is not None:
                yield shed
