"""The vocabulary of an open model, as prompt/encode.py asks for it. Knows no text and no template.

Invariant: a control token's spelling is the engine's own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .engine.handles import Model
from .model_file import ModelShape

_TOKEN_NORMAL, _TOKEN_BYTE = 1, 6  # tokenizer.ggml.token_type


class Vocabulary:
    """A Tokenizer (prompt/encode.py) over the engine."""

    def __init__(self, shape: ModelShape, model: Model) -> None:
        self._shape = shape
        self._model = model

    @property
    def bos_id(self) -> int | None:
        return self._model.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._model.eos_id

    @property
    def add_bos(self) -> bool:
        return self._model.add_bos

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        return self._model.tokenize(text, add_special, parse_special)

    def token_text(self, token: int) -> str:
        return self._model.token_text(token)

    def control_tokens(self) -> dict[str, int]:
        return self._control_tokens

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the engine ends an answer."""
        return frozenset(token for token in range(self._model.n_vocab) if self._model.is_end(token))

    def token_of(self, text: str) -> int | None:
        """The token that is spelled exactly so in the file, whatever its kind."""
        found: Any = self._shape.file.metadata.get("tokenizer.ggml.tokens")
        pieces = found.load() if found is not None else []
        return pieces.index(text) if text in pieces else None

    @cached_property
    def _control_tokens(self) -> dict[str, int]:
        if not self._model.has_vocabulary:
            return {}
        # The header's types narrow the vocabulary down to a few; only the engine knows what it made of those.
        types: Any = self._shape.file.metadata.get("tokenizer.ggml.token_type")
        kinds = types.load() if types is not None else [0] * self._model.n_vocab
        candidates = {token for token, kind in enumerate(kinds) if kind not in (_TOKEN_NORMAL, _TOKEN_BYTE)}
        candidates.update(self._model.special_ids())
        return {self.token_text(t): t for t in sorted(candidates) if self._model.has_control_text(t)}
