"""Files of prompts and of texts to judge: many requests through one loop, results as each is done.

Knows tasks and the loop; no files, no flags. Invariant: at most a few requests a slot are in the loop at once, however
many there are; what is left when the caller stops is cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import HgError, UsageError
from ..reply import Chunk, Reply
from ..writing import Writing
from .loop import BatchLoop
from .tasks import Answer, Judgement, Prefix, Scored, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The result of input number `index`, or why there is none."""

    index: int
    result: T | None
    error: HgError | None = None


@dataclass(frozen=True)
class Score:
    """Of one text: each label's log-probability, the sum over its tokens, and its share among the labels.

    `computed`: tokens that were read for this text, its prefix apart.
    """

    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    computed: int


Stopped = Callable[[], bool]
_LOOK_S = 0.2  # between two looks at whether the caller wants to stop


def _never() -> bool:
    return False


def answers(
    loop: BatchLoop, writings: Iterable[Callable[[], Sequence[Writing]]], stopped: Stopped = _never
) -> Iterator[Done[tuple[Reply, ...]]]:
    """Replies to each entry of `writings`, as they are finished. An entry makes the writings of one prompt: several
    answers to it fork the first. It is called on this thread, while others are answered; it may raise its error.
    Once `stopped` is true nothing more comes."""

    def started(index: int, make: Callable[[], Sequence[Writing]], out: Callable[[int, Any], None]) -> list[Task]:
        group = _Group(make())
        tasks: list[Task] = []
        for at, writing in enumerate(group.writings):
            first = tasks[0] if tasks else None
            tasks.append(Answer(writing, group.sink(at, lambda item: out(index, item)), parent=first))
        return tasks

    return _finished(loop, writings, started, stopped)


def scores(
    loop: BatchLoop,
    prefix: Sequence[int],
    texts: Iterable[Callable[[], Sequence[int]]],
    labels: Sequence[Sequence[int]],
    stopped: Stopped = _never,
) -> Iterator[Done[Score]]:
    """The score of each text after `prefix`, as they are finished; `prefix` is read once. An entry of `texts` makes a
    text's tokens. Raises HgErrors that concern the prefix."""
    if not labels or any(not label for label in labels):
        raise UsageError("there is no label to score", "give at least one, such as yes,no")
    head: Task | None = None
    if prefix:
        read: SimpleQueue[Any] = SimpleQueue()
        head = Prefix(prefix, read.put)
        loop.submit(head)
        if isinstance(problem := _waited(read, stopped), HgError):
            raise problem

    def started(index: int, make: Callable[[], Sequence[int]], out: Callable[[int, Any], None]) -> list[Task]:
        tokens = [*prefix, *make()]
        if not tokens:
            raise UsageError("the text to judge is empty", "give some text")

        def score(item: Scored | HgError) -> None:
            out(index, item if isinstance(item, HgError) else _score(item))

        return [Judgement(tokens, labels, score, parent=head)]

    try:
        yield from _finished(loop, texts, started, stopped)
    finally:
        if head is not None:
            loop.release(head)


def _score(scored: Scored) -> Score:
    largest = max(scored.logprobs)
    shares = [math.exp(logprob - largest) for logprob in scored.logprobs]
    return Score(scored.logprobs, tuple(share / sum(shares) for share in shares), scored.computed)


class _Group:
    """Answers to one prompt: one item when all are there, or the first error."""

    def __init__(self, writings: Sequence[Writing]) -> None:
        self.writings = writings
        self._replies: dict[int, Reply] = {}
        self._over = False

    def sink(self, at: int, out: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(item: Chunk | HgError) -> None:
            if self._over:
                return
            if isinstance(item, HgError):
                self._over = True
                out(item)
            elif item.reply is not None:
                self._replies[at] = item.reply
                if len(self._replies) == len(self.writings):
                    self._over = True
                    out(tuple(self._replies[index] for index in range(len(self.writings))))

        return take


_Started = Callable[[int, Any, Callable[[int, Any], None]], list[Task]]


def _waited(items: SimpleQueue[Any], stopped: Stopped) -> Any:
    """The next item; None once `stopped` is true."""
    while not stopped():
        with suppress(Empty):
            return items.get(timeout=_LOOK_S)
    return None


def _finished(loop: BatchLoop, makers: Iterable[Any], started: _Started, stopped: Stopped) -> Iterator[Done[Any]]:
    """Keeps the loop busy with `makers` and gives what is done."""
    found: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    open_: dict[int, list[Task]] = {}
    source = enumerate(makers)
    more = True
    try:
        while (more or open_) and not stopped():
            while more and len(open_) < 2 * loop.parallel:
                index, make = next(source, (-1, None))
                if make is None:
                    more = False
                    break
                try:
                    tasks = started(index, make, lambda at, item: found.put((at, item)))
                    loop.submit(*tasks)
                except HgError as error:
                    yield Done(index, None, error)
                else:
                    open_[index] = tasks
                if not found.empty():
                    break
            if open_:
                one = _waited(found, stopped)
                if one is None:
                    return
                index, item = one
                del open_[index]
                yield Done(index, None, item) if isinstance(item, HgError) else Done(index, item)
    finally:
        for tasks in open_.values():
            for task in tasks:
                loop.cancel(task)


def ordered(done: Iterable[Done[T]]) -> Iterator[Done[T]]:
    """The same in the order of the inputs."""
    kept: dict[int, Done[T]] = {}
    wanted = 0
    for item in done:
        kept[item.index] = item
        while wanted in kept:
            yield kept.pop(wanted)
            wanted += 1
