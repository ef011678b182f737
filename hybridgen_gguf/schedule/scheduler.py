"""Which requests run, and what the next step does: one token of everybody who writes, then prompts up to a time budget.

Prompts share their part of a step by deficit round robin. Cells are counted exactly; where they run out, ended requests
give up theirs, then the newest request goes to host memory and comes back later. Waiting requests are taken by priority
and age. Pure: no clock, no engine; the times come in, and what is to be done goes out as a `Step`.
Invariants: every cell is counted once; a request that was taken ends; a step's predicted seconds stay within the budget
unless its rows of decode alone are above it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable

from ..errors import Busy, DoesNotFit
from ..settings import CELL_STEP
from ..units import round_up
from .cells import Cells
from .job import Action, Job, Part, Rules, Step
from .prefix import PrefixTree
from .times import StepTimes, Work

_QUANTUM = 32  # tokens of a prompt in one turn: as many as the matrices like at least
_HEADROOM = 64  # cells for each running job that a newcomer leaves free


class Scheduler:
    """Over a pool of `cells`, steps of at most `n_batch` tokens. Jobs that run have sequences below `rules.parallel`,
    the only ones that a step may name; the others below `sequences` are a shelf for what ended jobs leave.

    `share`: prompts may take each other's chunks. Without it (a window or a recurrent state cannot be forked in its
    middle) a job takes of its parent what ends where the parent does, and nothing is kept for others.
    """

    def __init__(
        self, cells: int, sequences: int, n_batch: int, *, rules: Rules, times: StepTimes, share: bool = True
    ) -> None:
        self.rules, self.times = rules, times
        self.cells, self.tree = Cells(cells), PrefixTree()
        self._n_batch, self._share = n_batch, share
        self._numbers = list(range(rules.parallel))
        self._shelf = list(range(rules.parallel, sequences))
        self.waiting: dict[int, Job] = {}
        self.running: dict[int, Job] = {}
        self.out: dict[int, Job] = {}
        self._held: dict[int, Job] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # sequences of ended jobs, the longest unused first
        self._ring: deque[Job] = deque()  # readers in the order of their turns
        self._turn: Job | None = None  # the reader that has had its quantum for this turn
        self._group: object = None
        self._group_since = 0.0

    # --- what comes in ---

    def submit(self, job: Job) -> None:
        """Takes a job. Raises DoesNotFit for one that can never run, Busy when the queue is full."""
        if job.prompt >= self.cells.size:
            raise never_fits(job.prompt, self.cells.size)
        if len(self.waiting) >= self.rules.queue:
            raise Busy(
                f"{len(self.waiting)} requests are waiting already",
                "try later, or load the model with rules that let more wait",
            )
        job.most = min(job.most, self.cells.size)
        self.waiting[job.key] = job

    def end(self, job: Job, *, keep: bool = True) -> list[Action]:
        """A job has ended, or nobody needs what it holds any more. What is to be done now. `keep`: its chunks may be of
        use later."""
        was, job.state = job.state, "ended"
        for table in (self.waiting, self.running, self.out, self._held):
            table.pop(job.key, None)
        self._leave_ring(job)
        if was not in ("running", "held"):
            return []
        holds = keep and job.hold and was == "running"
        keeps = keep and self._share and job.done >= self.tree.chunk
        if not holds and not keeps:
            return [self._dropped(job.sequence)]
        actions = self._shelved(job)
        if holds:
            job.state = "held"
            self._held[job.key] = job
        elif job.sequence < self.rules.parallel:
            actions.append(self._dropped(job.sequence))
        else:
            self._kept[job.sequence] = None
        return actions

    def _shelved(self, job: Job) -> list[Action]:
        """Its cells under a number that no running job needs, if there is one; then others may find what it wrote, too:
        it may begin the next turn's prompt."""
        actions: list[Action] = []
        if job.sequence < self.rules.parallel:
            if not self._shelf and self._kept:
                actions.append(self._dropped(self._kept.popitem(last=False)[0]))
            if not self._shelf:
                return actions
            number = heapq.heappop(self._shelf)
            actions.append(Action("fork", job.sequence, to=number, length=job.done))
            self.cells.fork(job.sequence, number, job.done)
            actions.append(self._dropped(job.sequence))
            job.sequence = number
        self.tree.drop(job.sequence)
        if self._share:
            self.tree.claim(job.sequence, job.tokens[: job.done], job.adapters, job.done)
        return actions

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running or self.out)

    @property
    def used(self) -> int:
        """Cells that jobs need which have not ended; chunks kept for later are not among them."""
        held = {job.sequence for job in (*self.running.values(), *self._held.values())}
        return self.cells.size - self.cells.free - self.cells.only(set(self._kept) - held)

    # --- what goes out ---

    def plan(self, now: float) -> Step:
        """The next step. Jobs' `done` counts are already those after it."""
        step = Step()
        self._make_room(step)
        if step.full:
            return step
        while True:
            self._bring_back(step)
            self._admit(step, now)
            if self.running or not (self.waiting or self.out) or not self._give_up_held(step):
                break
        jobs = self._grouped(now)
        rows = [job for job in jobs if job.pending == 1]
        work = Work(len(rows), sum(job.done for job in rows))
        for job in rows:
            self._read(step, job, 1)
        self._read_prompts(step, [job for job in jobs if job.pending > 1], work)
        return step

    def took(self, parts: Iterable[Part], seconds: float) -> None:
        """What a step really took."""
        self.times.took(work_of(parts), seconds)

    # --- cells ---

    def _make_room(self, step: Step) -> None:
        """Cells for the next token of everybody: of kept chunks, then of the newest jobs."""
        while self.running:
            jobs = self.running.values()
            reading = any(job.pending > 1 for job in jobs)
            needed = sum(job.pending == 1 for job in jobs) + (1 if reading else 0)
            if needed <= self.cells.free or self._evict(step, needed):
                return
            newest = self._newest()
            if newest is None:
                if not self._give_up_held(step):
                    step.full.extend(job for job in jobs if self.cells.free < 1)
                    return
                continue
            self._swap_out(step, newest)

    def _newest(self) -> Job | None:
        """The job to go to host memory: the newest whose going frees cells, but never the last one."""
        going = [job for job in self.running.values() if self.cells.alone(job.sequence)]
        return max(going, key=lambda job: (job.arrived, job.key)) if len(self.running) > 1 and going else None

    def _swap_out(self, step: Step, job: Job) -> None:
        step.actions += [Action("save", job.sequence, job), self._dropped(job.sequence)]
        self._leave_ring(job)
        del self.running[job.key]
        job.state, job.sequence = "out", -1
        self.out[job.key] = job

    def _bring_back(self, step: Step) -> None:
        """Jobs in host memory, the oldest first, while there is room for them and for what all will write."""
        for job in sorted(self.out.values(), key=lambda job: (job.arrived, job.key)):
            needed = min(len(job.tokens) + self._growth(job), self.cells.size)
            if len(self.running) >= self.rules.parallel or not self._room_for(step, needed):
                return
            self._start(job)
            del self.out[job.key]
            step.actions.append(Action("restore", job.sequence, job))
            self.cells.extend(job.sequence, job.done)
            self._claim(job)

    def _room_for(self, step: Step, cells: int) -> bool:
        """Whether so many cells beyond what running prompts still need, and a number, are there; kept chunks go."""
        committed = sum(job.pending - 1 for job in self.running.values())
        if not self._numbers:
            return False
        return cells + committed <= self.cells.free or self._evict(step, cells + committed)

    def _evict(self, step: Step, needed: int) -> bool:
        """Gives up kept chunks, the longest unused first, until `needed` cells are free; none if that cannot help."""
        busy = {job.sequence for job in (*self.running.values(), *self._held.values())}
        if self.cells.free + self.cells.only(set(self._kept) - busy) < needed:
            return False
        while self.cells.free < needed and self._evict_one(step):
            pass
        return self.cells.free >= needed

    def _evict_one(self, step: Step) -> bool:
        if not self._kept:
            return False
        step.actions.append(self._dropped(self._kept.popitem(last=False)[0]))
        return True

    def _give_up_held(self, step: Step) -> bool:
        """The last resort: the newest prefix that is held for others goes, and they read it themselves."""
        if not self._held:
            return False
        job = self._held.pop(max(self._held))
        job.state = "ended"
        step.actions.append(self._dropped(job.sequence))
        return True

    def _dropped(self, sequence: int) -> Action:
        """Gives up a sequence's cells and its number."""
        self.cells.drop(sequence)
        self.tree.drop(sequence)
        heapq.heappush(self._numbers if sequence < self.rules.parallel else self._shelf, sequence)
        return Action("drop", sequence)

    # --- admission ---

    def _admit(self, step: Step, now: float) -> None:
        """Waiting jobs by priority and age. One that does not fit yet holds back those behind it, except forks of a
        prefix that is held for them: only they can free it."""
        for job in self.running.values():
            job.boost = 0
        blocked = bool(self.out)
        for job in sorted(self.waiting.values(), key=lambda job: (-self._rank(job, now), job.arrived, job.key)):
            if len(self.running) >= self.rules.parallel:
                return
            forks_held = job.parent is not None and job.parent.state == "held"
            if blocked and not forks_held:
                continue
            source, length, awaited = self._source(job)
            if awaited is not None:
                awaited.boost = max(awaited.boost, job.priority)
                continue
            room = job.prompt - length + self._growth(job)
            if source in self._kept:
                self._kept.move_to_end(source)  # what is about to be forked goes last
            if not self._room_for(step, min(room, self.cells.size - length)) or not self._still(source):
                blocked = True
                continue
            self._take(step, job, source, length)

    def _growth(self, job: Job) -> int:
        """Cells to leave free for what those who run, and `job` beside them, will write next."""
        jobs = (*self.running.values(), job) if self.running else ()
        return sum(min(job.most - len(job.tokens), _HEADROOM) for job in jobs)

    def _rank(self, job: Job, now: float) -> float:
        return job.priority + max(now - job.arrived, 0.0) / self.rules.age_s

    def _still(self, source: int) -> bool:
        """Whether the sequence has kept its cells while room was made."""
        return source < 0 or self.cells.length(source) > 0

    def _source(self, job: Job) -> tuple[int, int, Job | None]:
        """(sequence to fork or -1, its tokens to take, job to wait for or None)."""
        source, length = -1, 0
        parent = job.parent
        if parent is not None and job.forked and parent.state != "ended":
            if parent.done < job.forked or parent.state == "out":
                return -1, 0, parent
            if self._share or parent.done == job.forked:
                source, length = parent.sequence, job.forked
        if self._share:
            found = self.tree.find(job.tokens, job.adapters)
            if found.holder is not None and found.length > length:
                source, length = found.holder, found.length
            writer = None if found.writer is None or found.length < length else self._by_sequence(found.writer)
            if writer is not None:
                return -1, 0, writer
        return source, length, None

    def _by_sequence(self, sequence: int) -> Job | None:
        return next((job for job in self.running.values() if job.sequence == sequence), None)

    def _take(self, step: Step, job: Job, source: int, length: int) -> None:
        self._start(job)
        del self.waiting[job.key]
        if length:
            step.actions.append(Action("fork", source, to=job.sequence, length=length))
            self.cells.fork(source, job.sequence, length)
        job.done = job.reused = length
        self._claim(job)

    def _start(self, job: Job) -> None:
        job.state, job.sequence = "running", heapq.heappop(self._numbers)
        self.running[job.key] = job

    def _claim(self, job: Job) -> None:
        if self._share:
            self.tree.claim(job.sequence, job.tokens[: job.prompt], job.adapters, job.done)

    # --- a step ---

    def _grouped(self, now: float) -> list[Job]:
        """The running jobs of one set of adapters: the one whose turn it is, while it has some and no other has waited
        long."""
        groups: dict[object, list[Job]] = {}
        for job in self.running.values():
            groups.setdefault(job.adapters, []).append(job)
        if not groups:
            return []
        over = len(groups) > 1 and now - self._group_since >= self.rules.turn_s
        if self._group not in groups or over:
            others = [group for group in groups if group != self._group] or list(groups)
            self._group = min(others, key=lambda group: min(job.arrived for job in groups[group]))
            self._group_since = now
        elif len(groups) == 1:
            self._group_since = now
        return groups[self._group]

    def _read(self, step: Step, job: Job, count: int) -> None:
        step.parts.append(Part(job, job.done, count))
        self.cells.extend(job.sequence, count)
        before, job.done = job.done, job.done + count
        if job.done // self.tree.chunk > before // self.tree.chunk:
            self.tree.wrote(job.sequence, job.done)

    def _read_prompts(self, step: Step, readers: list[Job], work: Work) -> None:
        """Deficit round robin: each reader in its turn may read a quantum; what the budget cuts off it reads next."""
        for job in readers:
            if job not in self._ring:
                self._ring.append(job)
        room = self._room(readers, work)
        if len(readers) == 1 and room > 0:
            job, count = readers[0], min(readers[0].pending, room)
            if count == job.pending:
                self._leave_ring(job)
            self._read(step, job, count)
            return
        given: dict[int, int] = {}
        skipped = 0
        while room > 0 and self._ring and skipped < len(self._ring):
            job = self._ring[0]
            if job not in readers:  # another set of adapters
                self._ring.rotate(-1)
                skipped += 1
                continue
            if self._turn is not job:
                self._turn = job
                job.credit += _QUANTUM * job.weight
            left = job.pending - given.get(job.key, 0)
            count = min(max(int(job.credit), 1), left, room)
            given[job.key] = given.get(job.key, 0) + count
            job.credit -= count
            room -= count
            skipped = 0
            if count == left:
                self._leave_ring(job)
            elif job.credit < 1:
                self._turn = None
                self._ring.rotate(-1)
        for job in readers:
            if job.key in given:
                self._read(step, job, given[job.key])

    def _room(self, readers: list[Job], work: Work) -> int:
        """Tokens of prompts in this step."""
        if not readers:
            return 0
        rules = self.rules
        depth = max(job.done for job in readers)
        budget = rules.step_s if work.rows else rules.idle_s
        room = max(self.times.room(work, depth, budget), rules.least if work.rows else _QUANTUM)
        return min(room, self.cells.free, self._n_batch - work.rows)

    def _leave_ring(self, job: Job) -> None:
        job.credit = 0.0
        if self._turn is job:
            self._turn = None
        if job in self._ring:
            self._ring.remove(job)


def never_fits(prompt: int, cells: int) -> DoesNotFit:
    """The error for a prompt that leaves no cell for an answer."""
    enough = round_up(prompt + 1, CELL_STEP)
    return DoesNotFit(
        f"the prompt has {prompt} tokens, and the context holds {cells}, one of them for the answer",
        f"give -c {enough} or more, or shorten the prompt",
        {"n_ctx": enough},
    )


def work_of(parts: Iterable[Part]) -> Work:
    """What the parts of a step cost."""
    rows = row_cells = tokens = token_cells = 0
    for _, start, size in parts:
        if size == 1:
            rows, row_cells = rows + 1, row_cells + start
        else:
            tokens, token_cells = tokens + size, token_cells + size * (start + size // 2)
    return Work(rows, row_cells, tokens, token_cells)
