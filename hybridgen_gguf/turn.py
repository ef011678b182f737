"""Where an answer ends, and where its thoughts must: end tokens by file and template, a budget for thoughts.

Knows tokens, marks and probabilities; no engine and no text. Invariant: tokens that are forced are those by which the
model itself goes from thoughts to its answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from .answer import AnswerStream
from .prompt.encode import Prompt, tokens_behind
from .prompt.reasoning import MARK
from .sample.types import Draw, Logits, Scored

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Vocabulary(Protocol):
    """What is needed of a model's vocabulary (loader.Vocabulary, engine.fake.FakeModel)."""

    @property
    def bos_id(self) -> int | None: ...
    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]: ...
    def control_tokens(self) -> Mapping[str, int]: ...
    def token_of(self, text: str) -> int | None: ...


class Ends:
    """The tokens that end an answer beside those that the model's file names: what its template writes after one."""

    def __init__(self, vocabulary: Vocabulary, prompt: Prompt) -> None:
        marks = prompt.style.marks
        self._close = None if marks is None else token_at_start(vocabulary, marks.close)
        ends = {token_at_start(vocabulary, text) for text in prompt.style.ends} - {None, vocabulary.bos_id}
        # Where each message ends as thoughts do, the answer's end is another token if the template writes one.
        self._tokens: set[int] = {token for token in ends - {self._close} or ends if token is not None}

    @property
    def tokens(self) -> frozenset[int]:
        """These tokens."""
        return frozenset(self._tokens)

    def end(self, token: int, known: bool, thinking: bool) -> bool:
        """Whether the answer ends with `token`; `known`: the engine says so."""
        if thinking and token == self._close:
            return False
        return known or token in self._tokens


def token_at_start(vocabulary: Vocabulary, text: str) -> int | None:
    """The token for the mark that `text` begins with: a control token, or one of any kind that is spelled as a mark."""
    control = vocabulary.control_tokens()
    spelled = max((known for known in control if known and text.startswith(known)), key=len, default="")
    if spelled:
        return control[spelled]
    mark = MARK.match(text)
    return vocabulary.token_of(mark[0]) if mark else None


class ThoughtBudget:
    """Counts the tokens of thoughts; once there are enough, gives the tokens that end them, one by one."""

    def __init__(self, vocabulary: Vocabulary, prompt: Prompt, budget: int | None) -> None:
        """`budget` None: no limit."""
        marks = prompt.style.marks
        self._budget = budget if marks is not None else None
        self._closing = marks.closing.encode("utf-8") if marks is not None else b""
        self._vocabulary = vocabulary
        self._count = 0
        self._tries = 8  # a model may begin to think anew each time
        self._forced: deque[int] = deque()

    def next(self, text: AnswerStream) -> int | None:
        """The token that must come next, or None. Thoughts never end inside a character that the model may finish."""
        if self._budget is None:
            return None
        over = self._count - self._budget
        due = text.thinking and over >= 0 and (text.between_characters or over > _LONGEST_CHARACTER)
        if due and not self._forced and self._tries:
            self._tries -= 1
            self._forced.extend(self._closing_tokens())
        return self._forced.popleft() if self._forced else None

    def _closing_tokens(self) -> list[int]:
        return tokens_behind(self._vocabulary, self._closing, parse_special=True)

    def count(self, text: AnswerStream) -> None:
        """Called before each token is given to `text`."""
        self._count += text.thinking


def forced(token: int, drawn: Draw, logits: Logits, *, logprob: bool, draws: bool) -> Draw:
    """`drawn` with `token` in its place: the model's own log-probability of it, and as the only draw there was."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    own = float(wide[token] - largest) - math.log(float(np.exp(wide - largest).sum()))
    only = (Scored(token, 0.0),) if draws else ()
    return replace(drawn, token=token, logprob=own if logprob else None, draws=only)
