"""The governor against simulated machines: its decisions, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridgen_gguf.adapt.threads import Governor, others_seconds

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


class Crowd:
    """`cores` cores on which `busy(now)` other processes run; the slowest thread decides, as in the engine."""

    def __init__(self, cores: int, busy: Callable[[float], int]) -> None:
        self.cores, self.busy = cores, busy
        self.now = self.used = 0.0
        self.threads = cores

    def set_threads(self, decode: int, prompt: int) -> None:
        self.threads = decode

    def seconds(self, threads: int, busy: int) -> float:
        """A tenth of a token's work is not shared. A thread that shares its core has half of it."""
        return (0.01 + 0.09 / threads) * (2.0 if threads + busy > self.cores else 1.0)

    def write(self) -> None:
        busy = self.busy(self.now)
        seconds = self.seconds(self.threads, busy)
        self.now += seconds
        crowded = max(self.threads + busy - self.cores, 0)
        self.used += seconds * (busy - 0.5 * min(crowded, busy))  # who shares a core with us has half of it


@pytest.mark.parametrize("cores", [4, 8, 16])
@pytest.mark.parametrize("busy", [1, 3])
def test_several_cores_and_processes(cores: int, busy: int) -> None:
    """Near the best fixed count while others run; within 3 s after they end, all threads again, every time."""
    machine = Crowd(cores, lambda now: busy if int(now / 10) % 2 else 0)
    governor = Governor(machine, cores, cores, cpus=cores, others=lambda: machine.used, clock=lambda: machine.now)
    best = machine.seconds(cores - busy, busy)
    for round_ in range(3):
        for start, least in ((20 * round_, 1 / machine.seconds(cores, 0)), (20 * round_ + 10, 1 / best)):
            count, settled = 0, start + 3.0
            while machine.now < start + 10:
                before = machine.now
                machine.write()
                governor.on_token(machine.now - before)
                count += before >= settled
            assert count >= 0.93 * 7.0 * least
        assert governor.threads == cores - busy
