"""More memory never predicts slower; what the search chooses is what trying everything chooses."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.machine.rates import CPU
from hybridgen_gguf.plan.assign import Assignment, Problem, Sizes, fits, places_of, search, seconds_of
from hybridgen_gguf.plan.cost import PartCost

MIB = 1 << 20


@st.composite
def problems(draw: st.DrawFn, most_layers: int, devices: int) -> Problem:
    """Layers that differ in size, a CPU, and devices that are 2 to 40 times as fast."""
    n = draw(st.integers(2, most_layers))
    sizes = Sizes(*(tuple(draw(st.lists(st.integers(0, 400), min_size=n, max_size=n))) for _ in range(3)))
    sizes = Sizes(*(tuple(size * MIB for size in part) for part in (sizes.mixer, sizes.cache, sizes.heavy)))
    names = [f"GPU{i}" for i in range(devices)]
    speeds = {CPU: 1.0, **{name: draw(st.floats(2, 40)) for name in names}}
    cache_speed = draw(st.floats(0.05, 2))
    costs = {
        place: [
            PartCost(m / 3e10 / speed, c / 3e10 / speed / (cache_speed if place == CPU else 1), h / 3e10 / speed)
            for m, c, h in zip(sizes.mixer, sizes.cache, sizes.heavy, strict=True)
        ]
        for place, speed in speeds.items()
    }
    crossings = {name: draw(st.floats(0, 5e-4)) for name in names}
    budgets = {name: draw(st.integers(0, 600 * n)) * MIB for name in names}
    return Problem(sizes, budgets, ((1.0, costs, crossings),))


def everything(problem: Problem) -> float:
    """The least seconds of all placements that fit."""
    best = math.inf
    for layers in range(problem.n + 1):
        for counts in itertools.product(range(layers + 1), repeat=len(problem.budgets)):
            if sum(counts) != layers:
                continue
            on_device = [i for i, place in enumerate(places_of(problem, counts)) if place != CPU]
            for size in range(len(on_device) + 1):
                for heavy in itertools.combinations(on_device, size):
                    placement = Assignment(counts, frozenset(heavy))
                    if fits(problem, placement):
                        best = min(best, seconds_of(problem, placement))
    return best


def check_beside_brute_force(problem: Problem) -> None:
    found = search(problem)
    assert fits(problem, found)
    assert found.seconds <= everything(problem) * 1.01


@given(problems(5, 1))
@settings(max_examples=50, deadline=None)
def test_equals_brute_force_on_one_device(problem: Problem) -> None:
    check_beside_brute_force(problem)


@given(problems(4, 2))
@settings(max_examples=30, deadline=None)
def test_equals_brute_force_on_two_devices(problem: Problem) -> None:
    check_beside_brute_force(problem)


@given(problems(4, 3))
@settings(max_examples=25, deadline=None)
def test_equals_brute_force_on_three_devices(problem: Problem) -> None:
    check_beside_brute_force(problem)


@given(problems(20, 1), st.integers(1, 4000))
@settings(max_examples=60, deadline=None)
def test_more_memory_never_predicts_slower(problem: Problem, more: int) -> None:
    larger = Problem(problem.sizes, {name: size + more * MIB for name, size in problem.budgets.items()}, problem.uses)
    assert search(larger).seconds <= search(problem).seconds * (1 + 1e-9)


@given(problems(30, 3))
@settings(max_examples=20, deadline=None)
def test_three_devices_fit_and_beat_the_cpu(problem: Problem) -> None:
    found = search(problem)
    assert fits(problem, found)
    assert found.seconds <= seconds_of(problem, Assignment((0, 0, 0))) * (1 + 1e-9)
