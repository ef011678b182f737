"""What changes single logits before anything is chosen: biases, penalties on repeated tokens, DRY. Pure.

Knows the tokens seen so far. Invariant: tokens that are neither biased nor seen keep their logits to the last bit.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..errors import UsageError
from . import steps
from .dry import dry_penalties
from .options import SampleOptions
from .steps import Candidates
from .types import Logits


class Edits:
    """One sequence's biases and penalties. `leading`: those of "penalties" and "dry" that come before all other steps.

    Raises UsageError for a bias on a token outside the vocabulary.
    """

    def __init__(self, options: SampleOptions, leading: tuple[str, ...], n_vocab: int) -> None:
        self._options, self._leading, self._n_vocab = options, leading, n_vocab
        self._history: list[int] = []
        self._counts: Counter[int] = Counter()
        self._counting = "penalties" in options.active_steps()
        self._scratch: Logits | None = None
        self._breakers: dict[int, list[tuple[int, ...]]] = {}
        for sequence in options.dry_sequence_breakers:
            self._breakers.setdefault(sequence[0], []).append(sequence[1:])
        for token, _ in options.logit_bias:
            if not 0 <= token < n_vocab:
                raise UsageError(f"--logit-bias: token {token} is not in the vocabulary of {n_vocab}")

    @property
    def any(self) -> bool:
        """Whether any logit can change before the first step of the chain."""
        return bool(self._options.logit_bias or self._leading)

    def accept(self, token: int) -> None:
        """Adds one token of the prompt or the answer to what penalties and DRY look back on."""
        self._history.append(token)
        window = self._options.repeat_last_n
        if not self._counting or window == 0:
            return
        self._counts[token] += 1
        if 0 < window < len(self._history):
            old = self._history[-window - 1]
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]

    def edited(self, logits: Logits) -> Logits:
        """The logits after bias and the leading penalties: themselves, or a changed copy."""
        if not self.any:
            return logits
        if self._scratch is None:
            self._scratch = np.empty(self._n_vocab, np.float32)
        np.copyto(self._scratch, logits)
        return self.edit(self._scratch, None)

    def edit(self, logits: Logits, rows: dict[int, int] | None) -> Logits:
        """Changes `logits` in place; `rows` says where a token's logit is (None: at its id). Absent: left out."""
        for token, bias in self._options.logit_bias:
            row = token if rows is None else rows.get(token, -1)
            if row >= 0:
                logits[row] += np.float32(bias)
        for name in self._leading:
            self._penalise(name, logits, rows)
        return logits

    def edit_candidates(self, c: Candidates, name: str) -> Candidates:
        """The candidates after "penalties" or "dry" where those come later in the chain."""
        logits = c.logits.astype(np.float32)
        self._penalise(name, logits, {int(token): row for row, token in enumerate(c.ids)})
        return Candidates(c.ids, logits.astype(np.float64), False)

    def _penalise(self, name: str, logits: Logits, rows: dict[int, int] | None) -> None:
        o = self._options
        if name == "penalties":
            changed: dict[int, float] = dict(self._counts)
        else:
            seen = self._history if o.dry_penalty_last_n < 0 else self._history[-o.dry_penalty_last_n :]
            changed = dry_penalties(seen, o.dry_multiplier, o.dry_base, o.dry_allowed_length, self._breakers)
        at = {token: token if rows is None else rows.get(token, -1) for token in changed}
        index = np.array([row for row in at.values() if row >= 0], np.int64)
        if not len(index):
            return
        with np.errstate(over="ignore"):  # what DRY takes off can be more than float32 holds: the token is banned then
            amounts = np.array([changed[token] for token, row in at.items() if row >= 0]).astype(np.float32)
        if name == "penalties":
            logits[index] = steps.penalised(
                logits[index], amounts, o.repeat_penalty, o.frequency_penalty, o.presence_penalty
            )
        else:
            logits[index] -= amounts
