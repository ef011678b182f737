"""Token ids → logits: a prompt in chunks, then one token at a time. Knows no text and no sampling.

Invariant: after `read` returns True the context holds exactly `self.tokens`, and `logits()` are those after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import DoesNotFit
from .settings import CELL_STEP
from .units import round_up

SLOW_STEP = 0.2  # seconds
Progress = Callable[[int, int], None]
"""Called with (tokens read, tokens in all)."""


class DecodeContext(Protocol):
    """What decoding needs of a context (engine.handles.Context, engine.fake.FakeContext)."""

    n_ctx: int

    def decode(self, tokens: Sequence[int]) -> bool: ...
    def logits(self) -> NDArray[np.float32]: ...
    def set_abort(self, asked: Callable[[], bool] | None) -> None: ...
    def keep_prefix(self, length: int) -> bool: ...
    def clear(self) -> None: ...


class Decoder:
    """Feeds one sequence to a context, reusing the tokens it already holds."""

    def __init__(self, context: DecodeContext, chunk: int) -> None:
        """`chunk`: tokens of a prompt read between two looks at cancellation."""
        self.context = context
        self.chunk = max(chunk, 1)
        self.tokens: list[int] = []
        self._unknown = False  # an exception may have come between the engine's step and its entry in `tokens`
        self.step_s = 0.0  # what the last step took

    @property
    def position(self) -> int:
        """The position of the next token."""
        return len(self.tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keeps the cached tokens that `tokens` begins with and forgets the others; how many were kept.

        The last prompt token is always read again, because its logits are needed.
        """
        if self._unknown:
            self.forget()
        common = 0
        for ours, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(self.tokens) and not (common and self.context.keep_prefix(common)):
            self.context.clear()
            common = 0
        del self.tokens[common:]
        return common

    def read(
        self, tokens: Sequence[int], cancelled: Callable[[], bool] | None = None, progress: Progress | None = None
    ) -> bool:
        """Reads a prompt. False when `cancelled` became true; the context then holds the chunks read so far."""
        if self.position + len(tokens) > self.context.n_ctx:
            enough = round_up(self.position + len(tokens) + 1, CELL_STEP)
            raise DoesNotFit(
                f"the prompt has {len(tokens)} tokens, and the context holds {self.context.n_ctx}",
                f"give -c {enough} or more, or shorten the prompt",
                {"n_ctx": enough},
            )
        if cancelled is not None:
            self.context.set_abort(cancelled)
        try:
            for start in range(0, len(tokens), self.chunk):
                part = tokens[start : start + self.chunk]
                if cancelled is not None and cancelled():
                    return False
                if not self._decode(part):
                    return False
                if progress is not None:
                    progress(start + len(part), len(tokens))
        finally:
            if cancelled is not None:
                self.context.set_abort(None)
        return True

    def step(self, token: int, cancelled: Callable[[], bool] | None = None) -> bool:
        """Reads one token. False when the context is full, or `cancelled` interrupted a slow step."""
        if self.position >= self.context.n_ctx:
            return False
        start = time.perf_counter()
        if not self._decode((token,)):
            return False
        self.step_s = time.perf_counter() - start
        if cancelled is not None and self.step_s > SLOW_STEP:
            self.context.set_abort(cancelled)  # asking costs microseconds an operation: only where a step takes long
        return True

    def forget(self) -> None:
        """Empties the context."""
        self.context.clear()
        self.tokens.clear()
        self._unknown = False

    def _decode(self, tokens: Sequence[int]) -> bool:
        """Adds `tokens` to the context; False when stopped, with nothing of them left in it.

        A recurrent state that has moved on cannot be rewound; then all is forgotten.
        """
        self._unknown = True
        done = self.context.decode(tokens)
        if done:
            self.tokens.extend(tokens)
        elif not self.tokens or not self.context.keep_prefix(self.position):
            self.forget()
        self._unknown = False
        return done

    def logits(self) -> NDArray[np.float32]:
        """float32 [n_vocab] after the last token; valid until the next step."""
        return self.context.logits()
