"""A tokenizer for tests: every byte is a token, and control tokens are recognised as the engine does it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|a|>",
)
FIRST_CONTROL = 1000


class ByteTokenizer:
    """Byte b is token b; control token i is FIRST_CONTROL + i; `stripping` ones take the white space beside them."""

    def __init__(
        self, add_bos: bool = False, control: Sequence[str] = CONTROL, bos: int | None = 0, stripping: str = ""
    ) -> None:
        self._control = {text: FIRST_CONTROL + i for i, text in enumerate(control)}
        self._stripping = stripping
        self.bos_id = None if bos is None else FIRST_CONTROL + bos
        self.eos_id = FIRST_CONTROL + 1
        self.add_bos = add_bos

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        if not parse_special or not self._control:
            return list(text)
        spellings = sorted((spelling.encode() for spelling in self._control), key=len, reverse=True)
        patterns = [
            re.escape(s) if s.decode() != self._stripping else rb"\s*" + re.escape(s) + rb"\s*" for s in spellings
        ]
        ids: list[int] = []
        done = 0
        for match in re.finditer(b"|".join(patterns), text):
            ids += [*text[done : match.start()], self._control[match[0].strip().decode()]]
            done = match.end()
        return ids + list(text[done:])

    def token_text(self, token: int) -> str:
        return next(text for text, of in self._control.items() if of == token)

    def control_tokens(self) -> Mapping[str, int]:
        return self._control

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens for people: text as it is, control tokens in «»."""
        spelled = {token: f"«{text}»".encode() for text, token in self._control.items()}
        return b"".join(spelled.get(token) or bytes([token]) for token in tokens).decode()
