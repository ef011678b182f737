"""Text that spells control tokens: where it does, and stand-ins that keep it text on its way through a template. Pure.

Invariant: `restore` gives back what `hide` took, whatever the template did with the text around it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

_PRIVATE_FIRST, _PRIVATE_COUNT = 0xF0000, 0xFFFE  # Unicode's private-use plane 15
_LONGEST_TAIL = 256  # characters; a bound on the work an absurd vocabulary can cause


class ControlText:
    """Finds the spellings of control tokens in text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(self._lengths)) + "]") if lengths else None

    def starts(self, text: str) -> list[int]:
        """Places where a control token's spelling begins, overlapping ones too, and where `text` ends within one."""
        candidates = [] if self._first is None else [match.start() for match in self._first.finditer(text)]
        return [at for at in candidates if self._at(text, at) or self._may_begin(text, at)]

    def partition(self, text: str) -> list[tuple[str, int | None]]:
        """`text` in order as plain pieces (id None) and control tokens; the longest spelling at a place counts."""
        pieces: list[tuple[str, int | None]] = []
        done = 0
        for match in self._first.finditer(text) if self._first is not None else ():
            at = match.start()
            spelled = self._at(text, at) if at >= done else ""
            if spelled:
                pieces.append((text[done:at], None))
                pieces.append((spelled, self._tokens[spelled]))
                done = at + len(spelled)
        pieces.append((text[done:], None))
        return [piece for piece in pieces if piece[0]]

    def _at(self, text: str, at: int) -> str:
        for length in self._lengths[text[at]]:
            if text[at : at + length] in self._tokens:
                return text[at : at + length]
        return ""

    def _may_begin(self, text: str, at: int) -> bool:
        rest = text[at:] if len(text) - at < min(self._lengths[text[at]][0], _LONGEST_TAIL) else ""
        return bool(rest) and any(spelled.startswith(rest) for spelled in self._tokens)


class StandIns:
    """Private-use characters, random for each prompt, that take the place of a control spelling's first character."""

    def __init__(self, control: ControlText, texts: Iterable[str]) -> None:
        """`texts`: everything the prompt is made of; no stand-in occurs in them."""
        self._control = control
        self._taken = set().union(*texts)
        self._of: dict[str, str] = {}
        self._back: dict[int, str] = {}

    def hide(self, text: str) -> str:
        """`text` with nothing left in it that the tokenizer could take for a control token."""
        characters = list(text)
        for at in self._control.starts(text):
            characters[at] = self._stand_in(characters[at])
        return "".join(characters)

    def restore(self, text: str) -> str:
        """The opposite of `hide`."""
        return text.translate(self._back)

    def unescaped(self, text: str) -> str:
        r"""`text` with the stand-ins that a template wrote as JSON in ASCII (`\udb80\udc01`) as themselves."""
        for stand_in in self._of.values():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def occur_in(self, text: str) -> bool:
        """Whether `restore` would change `text`."""
        return any(stand_in in text for stand_in in self._of.values())

    def _stand_in(self, character: str) -> str:
        while character not in self._of:
            drawn = chr(_PRIVATE_FIRST + int.from_bytes(os.urandom(8), "big") % _PRIVATE_COUNT)
            if drawn not in self._taken:
                self._taken.add(drawn)
                self._of[character] = drawn
                self._back[ord(drawn)] = character
        return self._of[character]
