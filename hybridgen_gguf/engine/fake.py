"""A model and a context in memory with the methods of handles.Model and handles.Context, for tests of the code above.

The vocabulary is bytes: token n < 256 is that byte, 256 the start token, 257 the end token. The model has a `script`:
after any prompt it writes that text, then ends. Invariant: the same calls give the same errors as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

BOS, EOS, N_VOCAB = 256, 257, 258


class FakeModel:
    """Bytes as tokens."""

    n_vocab = N_VOCAB
    bos_id = BOS
    eos_id = EOS
    add_bos = True

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        return [BOS] * add_special + list(text)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < BOS else self.token_text(token).encode() * special

    def token_text(self, token: int) -> str:
        return {BOS: "<s>", EOS: "</s>"}.get(token, f"<0x{token:02X}>")

    def control_tokens(self) -> dict[str, int]:
        return {"<s>": BOS, "</s>": EOS}

    def token_of(self, text: str) -> int | None:
        return self.control_tokens().get(text)

    def is_end(self, token: int) -> bool:
        return token == EOS

    def close(self) -> None:
        pass


class FakeContext:
    """Writes `script` after the first read, one byte a step; `log` holds the token count of every decode."""

    def __init__(self, script: bytes, n_ctx: int = 256, n_batch: int = 64) -> None:
        self.n_ctx = n_ctx
        self.script = [*script, EOS]
        self.tokens: list[int] = []
        self.log: list[int] = []
        self.prompt_end = 0
        self.aborts = False  # the next decode is stopped by the abort callback
        self._n_batch = n_batch
        self._asked: Callable[[], bool] | None = None

    def decode(self, tokens: Sequence[int]) -> bool:
        if len(tokens) > self._n_batch:
            raise EngineError(f"decoding failed (code -1): {len(tokens)} tokens in a batch of {self._n_batch}")
        if len(self.tokens) + len(tokens) > self.n_ctx:
            raise EngineError(f"the context of {self.n_ctx} tokens is full", "give a larger -c, or a shorter prompt")
        if self.aborts or (self._asked is not None and self._asked()):
            return False
        self.tokens.extend(tokens)
        self.log.append(len(tokens))
        if len(tokens) > 1 or not self.prompt_end:
            self.prompt_end = len(self.tokens)
        return True

    def logits(self) -> NDArray[np.float32]:
        written = len(self.tokens) - self.prompt_end
        logits = np.zeros(N_VOCAB, np.float32)
        logits[self.script[min(written, len(self.script) - 1)]] = 50.0
        return logits

    def set_abort(self, asked: Callable[[], bool] | None) -> None:
        self._asked = asked

    def synchronize(self) -> None:
        pass

    def keep_prefix(self, length: int) -> bool:
        del self.tokens[length:]
        self.prompt_end = 0
        return True

    def tier_counters(self) -> None:
        return None

    def clear(self) -> None:
        self.keep_prefix(0)

    def close(self) -> None:
        pass
