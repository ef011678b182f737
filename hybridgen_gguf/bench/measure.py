"""llama-bench's tests on an open model: `pp512` reads 512 tokens, `tg128` writes 128, `@ d4096` after 4,096 others.

Knows no text: tokens are random. Invariant: one warm-up before each test; the cache is filled to the depth again before
each repetition and that time is not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..decode import DecodeContext, Decoder
from ..errors import UsageError


class Synchronized(DecodeContext, Protocol):
    """A context whose pending work can be waited for."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Test:
    """Read `n_prompt` tokens or write `n_gen`, after `n_depth` tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """As llama-bench spells it."""
        work = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{work} @ d{self.n_depth}" if self.n_depth else work


@dataclass(frozen=True)
class Record:
    """Tokens a second over the repetitions."""

    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    mean: float
    stdev: float
    median: float
    samples: tuple[float, ...]


def tests_of(n_prompt: list[int], n_gen: list[int], depths: list[int]) -> list[Test]:
    """Every prompt and every generation test at every depth, zeros left out. Raises UsageError for none at all."""
    if any(n < 0 for n in (*n_prompt, *n_gen, *depths)):
        raise UsageError("-p, -n and -d take no negative numbers")
    tests = [Test(n, 0, depth) for depth in depths for n in n_prompt if n]
    tests += [Test(0, n, depth) for depth in depths for n in n_gen if n]
    if not tests:
        raise UsageError("there is nothing to measure", "give -p or -n above 0")
    return tests


def run_test(
    context: Synchronized, test: Test, repeats: int, cancelled: Callable[[], bool], *, n_vocab: int, chunk: int
) -> Record | None:
    """Measures one test. None when cancelled."""
    decoder = Decoder(context, chunk)
    random_tokens = random.Random(0)
    samples: list[float] = []
    for repeat in range(repeats + 1):  # the first warms up
        context.clear()
        decoder.tokens.clear()
        if test.n_depth and not decoder.read(_tokens(random_tokens, n_vocab, test.n_depth), cancelled):
            return None
        context.synchronize()
        count = test.n_prompt or test.n_gen
        tokens = _tokens(random_tokens, n_vocab, count if repeat else min(count, 32))
        start = time.perf_counter()
        if test.n_prompt:
            decoder.read(tokens, cancelled)
        else:
            _write(decoder, tokens, cancelled)
        context.synchronize()
        seconds = time.perf_counter() - start
        if cancelled():
            return None
        if repeat:
            samples.append(count / seconds)
    return Record(
        test.name, test.n_prompt, test.n_gen, test.n_depth,
        statistics.fmean(samples), statistics.stdev(samples) if len(samples) > 1 else 0.0,
        statistics.median(samples), tuple(samples),
    )  # fmt: skip


def _tokens(random_tokens: random.Random, n_vocab: int, count: int) -> list[int]:
    return [random_tokens.randrange(n_vocab) for _ in range(count)]


def _write(decoder: Decoder, tokens: list[int], cancelled: Callable[[], bool]) -> None:
    for token in tokens:
        if cancelled() or not decoder.step(token):
            return


def run_tests(
    context: Synchronized,
    tests: list[Test],
    repeats: int,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    n_vocab: int,
    chunk: int,
) -> Iterator[Record]:
    """All tests in order, with random tokens below `n_vocab`, prompts in pieces of `chunk`; stops when cancelled."""
    if repeats < 1:
        raise UsageError(f"-r {repeats} is out of range", "give at least 1")
    for test in tests:
        record = run_test(context, test, repeats, cancelled, n_vocab=n_vocab, chunk=chunk)
        if record is None:
            return
        yield record
