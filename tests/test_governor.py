"""The governor against simulated machines: its decisions, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridgen_gguf.governor import Governor, others_seconds

FULL, ONE, CROWDED = 1 / 59, 1 / 38, 1 / 24  # seconds a token on two cores: two threads, one, two with another process


class Machine:
    """Two cores, a clock, and another process that uses one of them at times."""

    def __init__(self, busy: Callable[[float], bool], counters: bool = True) -> None:
        self.now = 0.0
        self.busy, self.counters = busy, counters
        self.used = 0.0
        self.threads = 2

    def set_threads(self, decode: int, prompt: int) -> None:
        assert 1 <= prompt <= 2
        self.threads = decode

    def others(self) -> float | None:
        return self.used if self.counters else None

    def write(self) -> float:
        busy = self.busy(self.now)
        seconds = ONE if self.threads == 1 else CROWDED if busy else FULL
        self.now += seconds
        self.used += seconds * (1.0 if busy else 0.03)
        return seconds


def run(machine: Machine, until: float) -> int:
    """Tokens written until then."""
    governor = Governor(machine, 2, 2, cpus=2, others=machine.others, clock=lambda: machine.now)
    count = 0
    while machine.now < until:
        governor.on_token(machine.write())
        count += 1
    return count


@pytest.mark.parametrize("counters", [True, False])
def test_idle_machine_keeps_the_plan(counters: bool) -> None:
    machine = Machine(lambda _: False, counters)
    assert run(machine, 10.0) >= 0.98 * 10.0 / FULL
    assert machine.threads == 2


@pytest.mark.parametrize(("counters", "least"), [(True, 0.95), (False, 0.85)])
def test_one_busy_process(counters: bool, least: float) -> None:
    machine = Machine(lambda now: now > 2.0, counters)
    written = run(machine, 12.0)
    assert written >= 2.0 / FULL + least * 10.0 / ONE


@pytest.mark.parametrize(("counters", "within"), [(True, 1.0), (False, 3.0)])
def test_back_to_full_speed(counters: bool, within: float) -> None:
    machine = Machine(lambda now: 1.0 < now < 4.0, counters)
    governor = Governor(machine, 2, 2, cpus=2, others=machine.others, clock=lambda: machine.now)
    while machine.now < 4.0 + within:
        governor.on_token(machine.write())
    assert machine.threads == governor.threads == 2


def test_short_disturbance_changes_nothing() -> None:
    machine = Machine(lambda now: int(now * 10) % 10 == 0)  # a tenth of a second in each
    assert run(machine, 10.0) >= 0.9 * 10.0 / FULL


def test_counters_of_this_system() -> None:
    first = others_seconds()
    second = others_seconds()
    assert first is not None and second is not None
    assert first > 0 and second - first < 5


def test_one_endless_token_is_enough() -> None:
    """With several busy processes a token may take seconds: the first one must already count."""
    machine = Machine(lambda _: True)
    governor = Governor(machine, 2, 2, cpus=2, others=machine.others, clock=lambda: machine.now)
    machine.now, machine.used = 4.0, 7.5
    governor.on_token(4.0)
    assert machine.threads == 1
