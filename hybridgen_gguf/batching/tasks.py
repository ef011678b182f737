"""What is done with the logits of a request: an answer is written, a prefix is only read, labels are judged.

Runs on the engine's thread; knows the writing and the sampler, no engine and no threads.
Invariant: each task gives its `out` one last item: a chunk with a reply, a result, or an error.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Failed, HgError
from ..reply import Chunk
from ..sample.types import Constraint, Draw, Floats, Logits, Row
from ..schedule import Job
from ..writing import Writing

Out = Callable[[Any], None]


class Task(ABC):
    """A request on its way. `job`: what the scheduler knows of it."""

    def __init__(
        self,
        tokens: Sequence[int],
        most: int,
        out: Out,
        *,
        parent: Task | None = None,
        priority: int = 0,
        adapters: Hashable = None,
        hold: bool = False,
    ) -> None:
        """`tokens`: the prompt; `most`: tokens that may follow; the others as in schedule.Job."""
        self.out = out
        self.ended = False
        self.job: Job = Job(
            0, list(tokens), len(tokens) + most, 0.0, priority, adapters,
            None if parent is None else parent.job, hold, self,
        )  # fmt: skip

    @abstractmethod
    def next(self, logits: Logits, position: int, drawn: int | None = None) -> int | None:
        """The token after `position` others, which is read next; None when the task has ended. `drawn`: what a native
        call drew for its `row`. May raise HgError."""

    def row(self, logits: Logits, position: int) -> Row | None:
        """What one native call can draw for this task together with others', or None."""
        return None

    def full(self) -> None:
        """There is no cell for another token, and never will be."""
        self.fail(Failed("the context is full", "give a larger -c, or a shorter prompt"))

    def fail(self, error: HgError) -> None:
        """Ends with an error."""
        if not self.ended:
            self.ended = True
            self.out(error)

    def followers(self) -> Sequence[Task]:
        """Tasks that begin where this one has ended, which fork it."""
        return ()

    def releases(self) -> Task | None:
        """A task whose held cells nobody needs any more now that this one has ended."""
        return None


class Answer(Task):
    """Writes an answer; `out` gets its chunks."""

    def __init__(self, writing: Writing, out: Out, **more: Any) -> None:
        super().__init__(writing.prompt.tokens, writing.most, out, **more)
        self._writing = writing
        self._begun = False

    def row(self, logits: Logits, position: int) -> Row | None:
        return self._writing.row(logits, position)

    def next(self, logits: Logits, position: int, drawn: int | None = None) -> int | None:
        writing = self._writing
        if not self._begun:
            self._begun = True
            writing.reused = self.job.reused
            chunk = writing.begin()
            if chunk is not None:
                self._last(chunk)
                return None
        draw = writing.draw(lambda within: self._draw(logits, position, drawn, within), lambda: logits)
        chunk = writing.put(draw)
        if chunk is None:
            return draw.token
        if chunk.reply is not None:
            self._last(chunk)
            return None
        self.out(chunk)
        return draw.token

    def _draw(self, logits: Logits, position: int, drawn: int | None, within: Constraint | None) -> Draw:
        sampler = self._writing.sampler
        return sampler.draw(logits, position, within) if drawn is None else sampler.of_row(drawn, logits, position)

    def full(self) -> None:
        self._last(self._writing.end("length"))

    def cancel(self) -> None:
        """Ends with the text so far."""
        if not self.ended:
            self._last(self._writing.end("cancelled"))

    def _last(self, chunk: Chunk) -> None:
        self.ended = True
        self.out(chunk)


class Prefix(Task):
    """Reads tokens that others will begin with, and holds them until it is released. `out` gets the number of tokens
    that were read anew."""

    def __init__(self, tokens: Sequence[int], out: Out, **more: Any) -> None:
        super().__init__(tokens, 0, out, hold=True, **more)

    def next(self, logits: Logits, position: int, drawn: int | None = None) -> int | None:
        self.ended = True
        self.out(self.job.prompt - self.job.reused)
        return None


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of labels, each the sum over its tokens; `computed`: tokens that were read for them."""

    logprobs: tuple[float, ...]
    computed: int


class Judgement(Task):
    """Reads a text and finds the log-probability of each label after it; `out` gets a `Scored`.

    Labels of several tokens go on from here, each in a sequence of its own that forks this one.
    """

    def __init__(self, tokens: Sequence[int], labels: Sequence[Sequence[int]], out: Out, **more: Any) -> None:
        """`labels`: tokens of each, at least one."""
        super().__init__(tokens, max(len(label) for label in labels) - 1, out, **more)
        self._labels = labels
        self.job.hold = any(len(label) > 1 for label in labels)
        self._sums = [0.0] * len(labels)
        self._open = sum(len(label) > 1 for label in labels)
        self._computed = 0

    def next(self, logits: Logits, position: int, drawn: int | None = None) -> int | None:
        known = log_softmax(logits)
        self._sums = [float(known[label[0]]) for label in self._labels]
        self._computed = self.job.prompt - self.job.reused
        self._finish()
        return None

    def followers(self) -> Sequence[Task]:
        return [
            Label(self, index, [*self.job.tokens, label[0]], label[1:])
            for index, label in enumerate(self._labels)
            if len(label) > 1 and not self.ended
        ]

    def add(self, index: int, logprob: float, computed: int) -> None:
        """What a label's further tokens give."""
        self._sums[index] += logprob
        self._computed += computed
        self._open -= 1
        self._finish()

    def _finish(self) -> None:
        if not self._open and not self.ended:
            self.ended = True
            self.out(Scored(tuple(self._sums), self._computed))


class Label(Task):
    """Reads a label's tokens after those of a judgement, and adds up what each was likely to be."""

    def __init__(self, judgement: Judgement, index: int, tokens: Sequence[int], rest: Sequence[int]) -> None:
        """`tokens`: up to the label's first; `rest`: its others."""
        job = judgement.job
        super().__init__(tokens, len(rest), self._gone, parent=judgement, priority=job.priority, adapters=job.adapters)
        self._judgement, self._index, self._rest = judgement, index, list(rest)
        self._sum = 0.0

    def next(self, logits: Logits, position: int, drawn: int | None = None) -> int | None:
        if self._judgement.ended:  # it failed, or nobody waits for it
            return None
        at = position - self.job.prompt
        self._sum += float(log_softmax(logits)[self._rest[at]])
        if at + 1 < len(self._rest):
            return self._rest[at]
        self.ended = True
        self._judgement.add(self._index, self._sum, position - self.job.reused)
        return None

    def releases(self) -> Task | None:
        return self._judgement if self._judgement.ended else None

    def _gone(self, error: HgError) -> None:
        self._judgement.fail(error)


def log_softmax(logits: Logits) -> Floats:
    """Natural-log probabilities of all tokens, in float64. Raises Failed where the model gives no numbers."""
    wide = logits.astype(np.float64)
    largest = float(wide.max())
    if not math.isfinite(largest):
        raise Failed("the model's logits are not numbers")
    total: Floats = wide - largest - math.log(float(np.exp(wide - largest).sum()))
    return total
