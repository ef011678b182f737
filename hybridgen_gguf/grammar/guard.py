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
    def allowed(self, ids: Ids | None) -> NDArray[np.bool_]:
        """Which of `ids` (None: of all tokens) may come next."""
        found = self._rules.allowed(ids)
        kind = self._kind if ids is None else self._kind[ids]
        found &= kind != _HIDDEN
        found[kind == _END] = self._rules.finished and not self._ignore_end
        if self._opening is not None and not self._begun:
            found[self._opening if ids is None else ids == self._opening] = True
        return found
