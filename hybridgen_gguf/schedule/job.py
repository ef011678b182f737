"""What the scheduler knows of a request, what it wants done, and what a user may set. Plain data.

Invariant: `done` of a job's tokens are in cells of its sequence; the others are still to be read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..errors import UsageError

State = Literal["waiting", "running", "out", "held", "ended"]
"""out: its cells were copied to host memory; held: it has ended and keeps its cells for those who fork it."""


@dataclass(eq=False, slots=True)
class Job:
    """One request. `tokens`: its prompt, then what it has written; `most`: positions that it may take at the end.

    `parent`: a job whose tokens this one begins with: it is waited for and forked. `hold`: keeps its cells when it has
    ended. `adapters`: which LoRA adapters it wants, as a key: jobs with different keys never share a step or a chunk.
    `data` belongs to whoever runs the jobs.
    """

    key: int
    tokens: list[int]
    most: int
    arrived: float
    priority: int = 0
    adapters: Hashable = None
    parent: Job | None = None
    hold: bool = False
    data: Any = None
    prompt: int = field(init=False)
    forked: int = field(init=False)  # tokens in common with the parent, which can be taken from it
    state: State = "waiting"
    sequence: int = -1
    done: int = 0
    reused: int = 0
    credit: float = 0.0  # tokens of a prompt that it may still read in this turn
    boost: int = 0  # the highest priority of those who wait for what it computes

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.forked = 0
        if self.parent is not None:
            common = 0
            for ours, theirs in zip(self.tokens[:-1], self.parent.tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            self.forked = common

    @property
    def pending(self) -> int:
        """Tokens that are known and not read yet."""
        return len(self.tokens) - self.done

    @property
    def weight(self) -> float:
        """Its share of the prompts' time beside a job of priority 0."""
        return 2.0 ** max(-4, min(max(self.priority, self.boost), 4))


class Part(NamedTuple):
    """`size` of a job's tokens, from position `start` on, in one step."""

    job: Job
    start: int
    size: int


class Action(NamedTuple):
    """To be done in order. drop: `sequence` gives up its cells; fork: `to`, which is empty, takes the first `length`
    cells of `sequence` too; save: the cells of `job`, in `sequence`, go to host memory; restore: they come back."""

    kind: Literal["drop", "fork", "save", "restore"]
    sequence: int
    job: Job | None = None
    to: int = -1
    length: int = 0


@dataclass
class Step:
    """What to do now: actions, then one step of all parts. `full`: jobs that no cell is left for, and never will be."""

    actions: list[Action] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    full: list[Job] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """What a user may set. Seconds, tokens, counts.

    `parallel`: jobs that run at once; `step_s`: what a step may take while somebody waits for its next token; `idle_s`:
    where nobody does; `queue`: jobs that may wait; `age_s`: so long a wait is worth one priority; `turn_s`: so long a
    set of adapters may keep another waiting. `least`: tokens of prompts in every step, however full it is.
    """

    parallel: int = 8
    step_s: float = 0.1
    idle_s: float = 1.0
    queue: int = 1024
    age_s: float = 10.0
    turn_s: float = 2.0
    least: int = 8

    def __post_init__(self) -> None:
        for flag, value in (("--parallel", self.parallel), ("queue", self.queue)):
            if value < 1:
                raise UsageError(f"{flag} {value} is out of range", "give at least 1")
        if not 0.001 <= self.step_s <= 60:
            raise UsageError(f"--step-ms {1000 * self.step_s:g} is out of range", "give 1 to 60000 milliseconds")
