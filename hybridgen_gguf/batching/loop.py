"""The engine's thread: takes requests, does the scheduler's steps on the context, hands out what they give.

The scheduler and the engine belong to this thread alone; other threads leave messages. Knows tasks, not their meaning.
Invariants: an error of one request ends that one; a request that has ended, or was cancelled, has given up its cells
before the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..engine.sequences import MOST_SEQUENCES, Sequences, StepFailed
from ..engine.sequences import Part as Rows
from ..errors import Busy, EngineError, Failed, HgError, UsageError
from ..loader import OpenModel
from ..owner import Owner
from ..sample.types import NativeSampler
from ..schedule import UNKNOWN, Action, Job, Part, Rates, Rules, Scheduler, StepTimes, never_fits
from ..writing import Writing
from .streams import Inbox, Stream
from .tasks import Answer, Task

if TYPE_CHECKING:
    import asyncio

_Message = Callable[[], None]


@dataclass(frozen=True)
class Counts:
    """What the loop has done and has now. Tokens, steps, cells, seconds. `python_s`: without the engine's part."""

    steps: int
    computed: int
    written: int
    swapped: int
    failed: int
    waiting: int
    running: int
    cells: int
    cells_used: int
    cells_free: int
    step_s: float
    engine_s: float
    longest_step_s: float

    @property
    def python_s(self) -> float:
        return self.step_s - self.engine_s


@dataclass(frozen=True)
class Batching:
    """How many requests share a context, and what its steps are predicted to take. `sequences` None: the context's.
    `native`: the engine's own sampler passes, which draw for all rows of a step at once."""

    rules: Rules
    rates: Rates = UNKNOWN
    sequences: Sequences | None = None
    native: NativeSampler | None = None


class BatchLoop:
    """Answers many requests at once. `owner`: who closes the model."""

    def __init__(self, opened: OpenModel, owner: Owner, batching: Batching) -> None:
        rules, share = batching.rules, opened.shape.forks_anywhere
        self.sequences = batching.sequences or Sequences(opened.context)
        numbers = MOST_SEQUENCES if share else rules.parallel  # states of recurrent layers and windows cost memory
        self.scheduler = Scheduler(
            self.sequences.n_ctx,
            numbers,
            self.sequences.n_batch,
            rules=rules,
            times=StepTimes(batching.rates),
            share=share,
        )
        self._owner, self._rules, self._native = owner, rules, batching.native
        self.parallel = rules.parallel
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self._open, self._counting = 0, threading.Lock()
        self._key = 0
        self._saved: dict[int, bytearray] = {}
        self._tasks: set[Task] = set()
        self._woken: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        self._steps = self._computed = self._written = self._swapped = self._failed = 0
        self._step_s = self._engine_s = self._longest = 0.0
        self._ended: HgError | None = None
        self._thread = threading.Thread(target=self._run, name="hgguf-engine", daemon=True)
        self._thread.start()

    # --- any thread ---

    def submit(self, *tasks: Task) -> None:
        """Takes requests. Raises DoesNotFit for one that can never run, Busy when too many wait, UsageError after close
        and in a forked child; then none is taken."""
        self._owner.check()
        for task in tasks:
            if task.job.prompt >= self.sequences.n_ctx:
                raise never_fits(task.job.prompt, self.sequences.n_ctx)
        now = time.perf_counter()
        for task in tasks:
            task.job.arrived = now
        with self._counting:
            if self._ended is not None:
                raise self._ended
            if self._open + len(tasks) > self._rules.queue + self._rules.parallel:
                raise Busy(
                    f"{self._open} requests are open already",
                    "try later, or load the model with rules that let more wait",
                )
            self._open += len(tasks)
            self._messages.put(lambda: self._accept(tasks))

    def stream(self, writing: Writing) -> Stream:
        """Begins an answer. Errors as `submit`."""
        inbox = _LoopInbox(self._woken)
        task = Answer(writing, inbox.put, priority=writing.options.priority)
        self.submit(task)
        return Stream(inbox, lambda: self.cancel(task))

    def cancel(self, task: Task) -> None:
        """Ends a request after the step that runs now; its cells are free then. Safe in destructors and signals."""
        self._messages.put(lambda: self._cancelled(task))

    def release(self, task: Task) -> None:
        """The cells of a prefix are no longer needed."""
        self._messages.put(lambda: self._released(task))

    def counts(self) -> Counts:
        """What it has done, as of the last step. Raises UsageError after close."""
        self._owner.check()
        answer: SimpleQueue[Counts] = SimpleQueue()
        self._messages.put(lambda: answer.put(self._counts()))
        while True:
            with suppress(Empty):
                return answer.get(timeout=1.0)
            self._owner.check()
            if self._ended is not None:
                raise self._ended

    def stop(self) -> None:
        """The thread ends after its step, and with it all requests."""
        self._messages.put(lambda: None)

    # --- the engine's thread ---

    def _run(self) -> None:
        error: HgError = UsageError("the model is closed", "load it again")
        try:
            while True:
                first = self._messages.get() if self.scheduler.idle else None
                with self._owner.working():  # what messages ask for touches the engine, too
                    self._hear(first)
                    self._step()
        except UsageError as closed:
            error = closed
        except BaseException as problem:
            error = EngineError(f"the engine's thread ended: {type(problem).__name__}: {problem}")
            error.__cause__ = problem
        with self._counting:  # from now on nobody leaves a message that nobody would hear
            self._ended = error
        self._hear()
        for task in list(self._tasks):
            task.fail(error)
        self._wake()

    def _hear(self, first: _Message | None = None) -> None:
        """Messages of other threads, after `first`."""
        if first is not None:
            first()
        while not self._messages.empty():
            self._messages.get()()
        self._wake()

    def _accept(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._key += 1
            task.job.key = self._key
            self._tasks.add(task)
            try:
                self.scheduler.submit(task.job)
            except HgError as error:
                self._fail(task, error)

    def _cancelled(self, task: Task) -> None:
        if task in self._tasks:
            if isinstance(task, Answer):
                task.cancel()
            task.ended = True
            self._end(task, keep=False)

    def _released(self, task: Task) -> None:
        self._end(task)
        self._do(self.scheduler.end(task.job))  # its chunks may serve the next one with this prefix

    def _step(self) -> None:
        if self.scheduler.idle:
            return
        started = time.perf_counter()
        step = self.scheduler.plan(started)
        for job in step.full:
            job.data.full()
            self._end(job.data)
        self._do(step.actions)
        parts = [part for part in step.parts if part.job.state == "running"]
        if parts:
            begun = time.perf_counter()
            rows = self._decoded(parts)
            took = time.perf_counter() - begun
            self.scheduler.took(parts, took)
            self._engine_s += took
            for (part, row), drawn in zip(rows, self._drawn(rows), strict=True):
                self._continue(part.job, row, drawn)
            self._computed += sum(part.size for part in parts)
        self._wake()
        self._steps += 1
        took = time.perf_counter() - started
        self._step_s += took
        self._longest = max(self._longest, took)

    def _decoded(self, parts: Sequence[Part]) -> list[tuple[Part, Any]]:
        """Parts that have been read to the end of what is known, with their logits. One by one where all at once fail:
        then only who cannot be read alone fails."""
        try:
            rows = self.sequences.decode([_rows(part) for part in parts])
        except StepFailed as error:
            return self._one_by_one(parts, error)
        ending = [part for part in parts if not part.job.pending]
        return list(zip(ending, rows, strict=True))

    def _one_by_one(self, parts: Sequence[Part], error: StepFailed) -> list[tuple[Part, Any]]:
        found: list[tuple[Part, Any]] = []
        for part in parts:
            task: Task = part.job.data
            if len(parts) == 1:
                self._fail(task, error)
                continue
            try:
                if part.job.sequence in error.emptied:
                    self._read_again(part)
                rows = self.sequences.decode([_rows(part)])
            except StepFailed as alone:
                self._fail(task, alone)
            else:
                found += [(part, row.copy()) for row in rows]
        return found

    def _read_again(self, part: Part) -> None:
        """What a job had before this part, into its sequence, which a failed step has emptied."""
        job = part.job
        for start in range(0, part.start, self.sequences.n_batch):
            tokens = job.tokens[start : min(start + self.sequences.n_batch, part.start)]
            self.sequences.decode([Rows(job.sequence, start, tokens, "none")])

    def _drawn(self, rows: Sequence[tuple[Part, Any]]) -> list[int | None]:
        """A token for each row whose sampler allows one native call for all of them; None for the others."""
        drawn: list[int | None] = [None] * len(rows)
        if self._native is None or len(rows) < 2:
            return drawn
        wanted = [part.job.data.row(logits, part.job.done) for part, logits in rows]
        found = [row for row in wanted if row is not None]
        if found:
            tokens = iter(self._native.rows(found))
            drawn = [None if row is None else next(tokens) for row in wanted]
        return drawn

    def _continue(self, job: Job, logits: Any, drawn: int | None) -> None:
        """What comes after a job's last token."""
        task: Task = job.data
        try:
            token = task.next(logits, job.done, drawn)
        except HgError as error:
            self._fail(task, error)
            return
        except Exception as error:  # a fault of ours in one answer is no reason to end the others
            self._fail(task, Failed(f"the answer failed: {type(error).__name__}: {error}"))
            return
        if token is not None:
            job.tokens.append(token)
            self._written += 1
            return
        more = task.followers()
        self._end(task)
        if (held := task.releases()) is not None:
            self._released(held)
        with self._counting:
            self._open += len(more)
        self._accept(more)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in () if self._ended is not None else actions:  # the engine may be closed then
            if action.kind == "drop":
                self.sequences.drop(action.sequence)
            elif action.kind == "fork":
                self.sequences.fork(action.sequence, action.to, action.length)
            elif action.job is not None:
                self._swap(action.job, action)

    def _swap(self, job: Job, action: Action) -> None:
        """A job's cells to host memory, or back; its failure is the job's."""
        try:
            if action.kind == "save":
                self._saved[job.key] = self.sequences.save(action.sequence)
                self._swapped += 1
            elif not self.sequences.restore(action.sequence, self._saved.pop(job.key)):
                raise EngineError("the engine does not take a saved request back")
        except EngineError as error:
            self._fail(job.data, error)

    def _fail(self, task: Task, error: HgError) -> None:
        self._failed += 1
        task.fail(error)
        self._end(task, keep=False)

    def _end(self, task: Task, *, keep: bool = True) -> None:
        if task not in self._tasks:
            return
        self._tasks.discard(task)
        self._saved.pop(task.job.key, None)
        self._do(self.scheduler.end(task.job, keep=keep))
        with self._counting:
            self._open -= 1

    # --- waiting callers ---

    def _wake(self) -> None:
        for loop, events in self._woken.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_set_all, events)
        if self._woken:
            self._woken.clear()

    def _counts(self) -> Counts:
        scheduler = self.scheduler
        return Counts(
            self._steps, self._computed, self._written, self._swapped, self._failed,
            len(scheduler.waiting) + len(scheduler.out), len(scheduler.running),
            scheduler.cells.size, scheduler.used, scheduler.cells.free,
            self._step_s, self._engine_s, self._longest,
        )  # fmt: skip


class _LoopInbox(Inbox):
    """Remembers, on the engine's thread, which events are to be set after the step."""

    def __init__(self, woken: dict[asyncio.AbstractEventLoop, list[asyncio.Event]]) -> None:
        super().__init__()
        self._woken = woken

    def put(self, item: Any) -> None:
        super().put(item)
        if self.waiting is not None:
            loop, event = self.waiting
            self._woken.setdefault(loop, []).append(event)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _rows(part: Part) -> Rows:
    job = part.job
    tokens = job.tokens[part.start : part.start + part.size]
    return Rows(job.sequence, part.start, tokens, "none" if job.pending else "last")
