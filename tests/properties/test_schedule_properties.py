"""The scheduler against a pool that is kept cell by cell, under a virtual clock: nothing leaks, nobody starves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool

from hybridgen_gguf.errors import Busy, DoesNotFit, UsageError
from hybridgen_gguf.schedule import Job, Rates, Rules, Scheduler, Step, StepTimes
from hybridgen_gguf.schedule.cells import Cells
from hybridgen_gguf.schedule.prefix import PrefixTree
from hybridgen_gguf.schedule.scheduler import work_of
from hybridgen_gguf.schedule.times import Work

RATES = Rates(step=0.01, row=0.001, token=0.001, row_cell=1e-7, token_cell=1e-7)


class World:
    """A scheduler with its pool, and a clock that steps move by what the rates say, give or take noise."""

    def __init__(self, cells: int, rules: Rules, *, share: bool = True, seed: int = 0, noise: float = 0.0) -> None:
        self.pool, self.rules = Pool(cells), rules
        self.scheduler = Scheduler(cells, 40, 64, rules=rules, times=StepTimes(RATES), share=share)
        self.random, self.noise, self.now = random.Random(seed), noise, 0.0
        self.saved: dict[int, list[int]] = {}
        self.answers: dict[int, int] = {}  # job: tokens that it is going to write
        self.ended: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.computed = 0
        self.keys = 0

    def submit(self, tokens: list[int], answer: int, **more: object) -> Job:
        self.keys += 1
        job = Job(self.keys, list(tokens), len(tokens) + answer, self.now, **more)  # type: ignore[arg-type]
        self.scheduler.submit(job)
        self.answers[job.key] = answer
        return job

    def end(self, job: Job, *, keep: bool = True) -> None:
        self.act(Step(actions=self.scheduler.end(job, keep=keep)))
        self.ended[job.key] = self.now

    def act(self, step: Step) -> None:
        for action in step.actions:
            if action.kind == "fork":
                self.pool.fork(action.sequence, action.to, action.length)
            elif action.kind == "save":
                assert action.job is not None
                self.saved[action.job.key] = self.pool.tokens(action.sequence)
            elif action.kind == "restore":
                assert action.job is not None
                self.pool.add(action.sequence, 0, self.saved.pop(action.job.key))
            else:
                self.pool.drop(action.sequence)

    def step(self) -> Step:
        step = self.scheduler.plan(self.now)
        for job in step.full:
            assert self.pool.used == self.pool.size
            self.end(job)
        self.act(step)
        for part in step.parts:
            self.pool.add(part.job.sequence, part.start, part.job.tokens[part.start : part.start + part.size])
            self.computed += part.size
        seconds = StepTimes(RATES).seconds(work_of(step.parts)) * (1 + self.noise * self.random.random())
        self.now += seconds
        if step.parts:
            self.scheduler.took(step.parts, seconds)
        for part in step.parts:
            job = part.job
            if job.pending:
                continue
            self.first.setdefault(job.key, self.now)
            if len(job.tokens) - job.prompt >= self.answers[job.key]:
                self.end(job)
            else:
                job.tokens.append(self.random.randrange(500))
        self.check()
        return step

    def check(self) -> None:
        """The ledger says what the pool has, and every job's cells hold its own tokens."""
        cells = self.scheduler.cells
        assert self.pool.used == cells.size - cells.free
        for job in self.scheduler.running.values():
            assert self.pool.tokens(job.sequence) == job.tokens[: job.done]
            assert cells.length(job.sequence) == job.done
        assert len(self.scheduler.running) <= self.rules.parallel
        assert 0 <= self.scheduler.used <= self.pool.used

    def run(self, most: int = 20000) -> None:
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_ledger_counts_as_a_pool_does(data: st.DataObject) -> None:
    cells, pool = Cells(60), Pool(60)
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(("extend", "fork", "cut", "drop")))
        one, two = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
        length = len(pool.tokens(one))
        if what == "extend":
            count = data.draw(st.integers(1, 20))
            if count > cells.free:
                with pytest.raises(ValueError, match="are free"):
                    cells.extend(one, count)
                continue
            cells.extend(one, count)
            pool.add(one, length, [0] * count)
        elif what == "fork" and one != two and not pool.tokens(two):
            count = data.draw(st.integers(0, length))
            cells.fork(one, two, count)
            pool.fork(one, two, count)
        elif what == "cut" and length:
            count = data.draw(st.integers(0, length))
            cells.cut(one, count)
            pool.cut(one, count)
        elif what == "drop":
            cells.drop(one)
            pool.drop(one)
        assert cells.size - cells.free == pool.used
        for sequence in range(6):
            held = [holders for _, _, holders in pool.cells if sequence in holders]
            assert cells.length(sequence) == len(held)
            assert cells.alone(sequence) == sum(len(holders) == 1 for holders in held)
        some = set(data.draw(st.lists(st.integers(0, 5), max_size=4)))
        assert cells.only(some) == sum(holders <= some for _, _, holders in pool.cells)


def test_a_fork_of_more_than_there_is_is_refused() -> None:
    cells = Cells(10)
    cells.extend(0, 4)
    with pytest.raises(ValueError, match="holds 4 cells, not 5"):
        cells.fork(0, 1, 5)
    cells.fork(0, 1, 2)
    with pytest.raises(ValueError, match="holds cells already"):
        cells.fork(0, 1, 2)


@given(st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 1), max_size=12)), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_tree_finds_what_is_held_and_forgets_what_is_dropped(prompts: list[tuple[int, list[int]]]) -> None:
    tree = PrefixTree(3)
    held: dict[int, list[int]] = {}
    for sequence, tokens in prompts:
        if sequence in held:
            tree.drop(sequence)
            del held[sequence]
            continue
        found = tree.find(tokens)
        shared = [
            sum(1 for at in range(3, len(tokens), 3) if other[:at] == tokens[:at]) for other in held.values() if other
        ]
        assert found.length == 3 * max(shared, default=0)
        assert (found.holder is None) == (found.length == 0)
        if found.holder is not None:
            assert held[found.holder][: found.length] == tokens[: found.length]
        tree.claim(sequence, tokens)
        tree.wrote(sequence, len(tokens))
        held[sequence] = tokens
    for sequence in held:
        tree.drop(sequence)
    assert len(tree) == 0
    assert tree.find([0] * 9).length == 0


def test_adapters_have_trees_of_their_own() -> None:
    tree = PrefixTree(2)
    tree.claim(1, [1, 2, 3], "a", 2)
    assert tree.find([1, 2, 3], "a").length == 2
    assert tree.find([1, 2, 3], "b").length == 0


@st.composite
def loads(draw: st.DrawFn) -> Callable[[], World]:
    """A pool, rules, and requests that come over time; some begin alike, some are cancelled, some fork others."""
    cells, parallel = draw(st.sampled_from((300, 700, 1500))), draw(st.integers(1, 6))
    share, seed, noise = draw(st.booleans()), draw(st.integers(0, 999)), draw(st.sampled_from((0.0, 1.0)))
    count = draw(st.integers(1, 14))

    def made() -> World:
        world = World(cells, Rules(parallel=parallel, step_s=0.05), share=share, seed=seed, noise=noise)
        choose = random.Random(seed)
        base = [choose.randrange(500) for _ in range(cells)]
        jobs: list[Job] = []
        while len(jobs) < count or not world.scheduler.idle:
            if len(jobs) < count and choose.random() < 0.3:
                size = choose.randrange(1, cells - 1)
                alike = choose.randrange(size + 1)
                tokens = base[:alike] + [choose.randrange(500) for _ in range(size - alike)]
                parent = choose.choice(jobs) if jobs and choose.random() < 0.3 else None
                if parent is not None:
                    tokens = (parent.tokens[: parent.prompt] + tokens)[: cells - 2]
                more = {
                    "priority": choose.randrange(-2, 3),
                    "adapters": choose.choice(("", "", "x")),
                    "parent": parent,
                    "hold": choose.random() < 0.2,
                }
                if parent is not None:
                    more["adapters"] = parent.adapters
                jobs.append(world.submit(tokens, choose.randrange(60), **more))
            elif jobs and choose.random() < 0.02:
                job = choose.choice(jobs)
                if job.key not in world.ended:
                    world.end(job, keep=False)
            if not world.scheduler.idle:
                world.step()
            else:
                world.now += 0.1
            assert world.now < 3000, "somebody starves"
        for job in jobs:
            if job.state == "held":
                world.end(job, keep=False)
        assert len(world.ended) >= count
        assert world.scheduler.used == 0
        return world

    return made


@given(loads())
@settings(max_examples=60, deadline=None)
def test_every_request_ends_and_no_cell_is_lost(load: Callable[[], World]) -> None:
    world = load()
    # What is left is kept for later alone, and all of it can be had.
    world.submit([1] * (world.pool.size - 1), 0)
    world.run()
    assert world.keys in world.ended


@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from((0.03, 0.1)))
@settings(max_examples=40, deadline=None)
def test_steps_stay_within_their_budget_while_somebody_writes(seed: int, writers: int, step_s: float) -> None:
    world = World(4000, Rules(parallel=8, step_s=step_s), seed=seed)
    for number in range(writers):
        world.submit([number] * 5, 400)
    while any(job.pending > 1 for job in world.scheduler.running.values()) or world.scheduler.waiting:
        world.step()
    world.submit([9] * 1500, 1)
    rules = world.rules
    while world.scheduler.running and any(job.prompt == 1500 for job in world.scheduler.running.values()):
        before = world.now
        step = world.step()
        least = StepTimes(RATES).seconds(work_of([part for part in step.parts if part.size == 1]))
        floor = least + rules.least * (RATES.token + RATES.token_cell * 1500)
        assert world.now - before <= max(step_s, floor) * 1.02


def finished(prompts: list[int], **more: object) -> World:
    """Prompts of these lengths at once, beside a request that writes."""
    world = World(8000, Rules(parallel=8, step_s=0.06))
    world.submit([1], 2000)
    world.step()
    for number, length in enumerate(prompts):
        world.submit([number + 2] * length, 0, **more)
    for _ in range(4000):
        world.step()
        if len(world.ended) == len(prompts):
            return world
    raise AssertionError("prompts do not end")


def test_short_prompts_end_first_and_long_ones_go_on() -> None:
    world = finished([2000, 40, 900])
    order = sorted(world.ended, key=world.ended.__getitem__)
    assert order == [3, 4, 2]
    alone = finished([40])
    assert world.first[3] - world.first[1] < 3.5 * (alone.first[2] - alone.first[1])  # three share the budget


def test_a_higher_priority_reads_faster() -> None:
    world = World(8000, Rules(parallel=8, step_s=0.06))
    world.submit([1], 3000)
    world.step()
    low, high = world.submit([2] * 1500, 0), world.submit([3] * 1500, 0, priority=3)
    for _ in range(3000):
        world.step()
        if high.key in world.ended:
            break
    assert low.done < 1500 / 3


def test_ageing_takes_the_low_ones_too() -> None:
    world = World(600, Rules(parallel=1, step_s=0.1, age_s=1.0))
    low = world.submit([7] * 10, 5)
    for number in range(200):
        world.submit([number] * 10, 5, priority=5)
        world.step()
        if low.key in world.ended:
            return
        while len(world.scheduler.waiting) > 3:
            world.step()
    raise AssertionError("it never came to its turn")


def test_a_prefix_that_another_computes_is_waited_for() -> None:
    world = World(4000, Rules(parallel=8))
    prompt = [random.Random(0).randrange(500) for _ in range(1100)]
    first, second = world.submit([*prompt, 1], 3), world.submit([*prompt, 2], 3)
    world.run()
    assert first.reused == 0
    assert second.reused == 1024  # four whole chunks of 256
    assert world.computed == 1101 + 3 + 1101 - 1024 + 3


def test_a_cancelled_writer_of_a_prefix_is_replaced() -> None:
    world = World(4000, Rules(parallel=8))
    first, second = world.submit([5] * 1000, 3), world.submit([5] * 1000, 3)
    world.step()
    assert second.state == "waiting"
    world.end(first, keep=False)
    world.run()
    assert second.key in world.ended
    assert second.reused == 0


def test_answers_to_one_prompt_copy_nothing() -> None:
    world = World(4000, Rules(parallel=8))
    first = world.submit([5] * 1000, 3)
    forks = [world.submit([5] * 1000, 3, parent=first) for _ in range(5)]
    world.run()
    assert [job.reused for job in forks] == [999] * 5
    assert world.computed == 1000 + 3 + 5 * (1 + 3)


def test_the_newest_goes_to_host_memory_and_comes_back_without_reading_again() -> None:
    world = World(400, Rules(parallel=4), share=False)
    jobs = [world.submit([number] * 60, 200) for number in range(3)]
    seen = []
    while not world.scheduler.idle:
        step = world.step()
        seen += [(action.kind, action.job) for action in step.actions if action.job is not None]
    assert ("save", jobs[2]) in seen
    assert ("restore", jobs[2]) in seen
    assert all(job is not jobs[0] for _, job in seen)  # the oldest stays
    assert world.computed == 3 * (60 + 200)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    world = World(300, Rules(parallel=2, queue=2))
    with pytest.raises(DoesNotFit, match="300 tokens, and the context holds 300") as caught:
        world.submit([1] * 300, 0)
    assert caught.value.nearest == {"n_ctx": 512}
    world.submit([1] * 299, 5)
    world.submit([1], 5)
    with pytest.raises(Busy, match="2 requests are waiting"):
        world.submit([1], 5)


def test_rules_out_of_range() -> None:
    with pytest.raises(UsageError, match="--parallel 0"):
        Rules(parallel=0)
    with pytest.raises(UsageError, match="--step-ms 0"):
        Rules(step_s=0)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
@settings(max_examples=50, deadline=None)
def test_times_follow_what_steps_take(rows: float, prompts: float) -> None:
    times, draw = StepTimes(RATES), random.Random(1)
    for _ in range(400):
        work = Work(draw.randrange(1, 8), draw.randrange(1000), draw.randrange(64), draw.randrange(5000))
        true = (RATES.step + RATES.row * work.rows + RATES.row_cell * work.row_cells) * rows
        true += (RATES.token * work.tokens + RATES.token_cell * work.token_cells) * prompts
        times.took(work, true)
    work = Work(4, 500, 32, 2000)
    true = (RATES.step + 4 * RATES.row + 500 * RATES.row_cell) * rows
    true += (32 * RATES.token + 2000 * RATES.token_cell) * prompts
    assert times.seconds(work) == pytest.approx(true, rel=0.15)
    assert times.room(Work(), 0, 0.0) == 0


def test_a_clock_that_jumps_stops_nobody() -> None:
    world = World(600, Rules(parallel=2))
    for number in range(4):
        world.submit([number] * 20, 10)
    for jump in (-1000.0, 5000.0, -3.0):
        world.now += jump
        world.step()
    world.run()
    assert len(world.ended) == 4
