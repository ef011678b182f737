"""Which tokens may come next in an answer that has a grammar: a `sample.Constraint`.

Thoughts are free; the answer fits the grammar from its first character. Control tokens have no text in an answer, so
none is allowed unless the grammar names tokens. Invariant: the text of an answer, cut where it may, is one that the
grammar goes on from.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..answer import AnswerStream

Ids = NDArray[np.int64]
_HIDDEN, _END = 1, 2


class Rules(Protocol):
    """Where a text stands in a grammar (engine.grammar.Grammar)."""

    n_vocab: int

    @property
    def finished(self) -> bool: ...
    def allowed(self, ids: Ids | None) -> NDArray[np.bool_]: ...
    def accept(self, token: int) -> None: ...
    def accept_text(self, text: str) -> None: ...


class Guard:
    """Follows one answer. `now` before each draw, `take` after it."""

    def __init__(
        self,
        rules: Rules,
        *,
        control: Collection[int],
        ends: Collection[int],
        opening: int | None = None,
        ignore_end: bool = False,
    ) -> None:
        """`control`: tokens without text of their own; `ends`: those that end an answer; `opening`: the token that
        begins thoughts, if one does; `ignore_end`: the answer ends only where the grammar leaves nothing else."""
        self._rules = rules
        self._kind = np.zeros(rules.n_vocab, np.uint8)
        self._kind[list(control)] = _HIDDEN
        self._kind[list(ends)] = _END
        self._can_end = bool(ends) and not ignore_end
        self._opening, self._ignore_end = opening, ignore_end
        self._begun = self._opened = False

    def over(self) -> bool:
        """Whether the answer is whole: nothing may come but its end, and no token of the vocabulary is one."""
        return not self._can_end and self._rules.finished and not self.allowed(None).any()

    def now(self, text: AnswerStream) -> Guard | None:
        """What the next token is held to: self, or None where it belongs to thoughts."""
        if not self._begun and text.answering:
            self._begun = True
            if text.beginning:  # the end of the thoughts and the beginning of the answer can be one token
                self._rules.accept_text(text.beginning)
        if self._begun or (text.undecided and not self._opened):
            return self
        return None

    def take(self, token: int) -> None:
        """`token` was drawn under `now`."""
        if token == self._opening and not self._begun:
            self._opened = True
            return
        self._begun = True
        self._rules.accept(token)

    def allowed(self, ids: Ids | None) -> NDArray[np.bool_]:
        """Which of `ids` (None: of all tokens) may come next."""
        found = self._rules.allowed(ids)
        kind = self._kind if ids is None else self._kind[ids]
        found &= kind != _HIDDEN
        found[kind == _END] = self._rules.finished and not self._ignore_end
        if self._opening is not None and not self._begun:
            found[self._opening if ids is None else ids == self._opening] = True
        return found
