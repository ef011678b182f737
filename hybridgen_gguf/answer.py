"""Tokens of an answer → what to show: thoughts apart from the answer, stop strings in the answer alone.

Knows the marks of a template and the spellings of control tokens; no model, no sampling, no terminal.
Invariant: without marks it is a `TextStream`; with them the answer's pieces joined are the answer, cut before the
earliest stop string in it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .prompt.reasoning import Marks, ThoughtSplitter
from .text import TextStream

REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")
"""auto, deepseek: thoughts apart; none: in the text, marks and all; deepseek-legacy: both."""
_FIRST = 0xDC00  # lone surrogates stand for control tokens: no decoded text holds one
_MOST_CONTROL = 0x400


class Piece(NamedTuple):
    """What may be shown now."""

    text: str
    reasoning: str = ""


class AnswerStream:
    """Turns tokens into thoughts and answer as they come.

    A mark that the vocabulary has as a control token is that token alone; text that merely spells it is text.
    """

    def __init__(
        self,
        token_bytes: Callable[..., bytes],
        stops: Sequence[str] = (),
        marks: Marks | None = None,
        *,
        control: Mapping[str, int] | None = None,
        inside: bool = False,
        form: str = "auto",
    ) -> None:
        """`token_bytes(token, special=...)`: a token's bytes; `control`: spelling → control token; `inside`: the prompt
        has opened the thoughts; `form`: one of REASONING_FORMATS. Raises UsageError for stop strings as TextStream."""
        self._token_bytes = token_bytes
        self._answer = TextStream(token_bytes, stops)
        self._whole = (
            TextStream(token_bytes, stops) if marks is not None and form in ("none", "deepseek-legacy") else None
        )
        self._keep_thoughts = form != "none"
        self._thoughts: list[str] = []
        self._beginning = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._splitter: ThoughtSplitter | None = None
        self._stand_ins: dict[int, str] = {}
        if marks is not None:
            spelled = [text for text in control or {} if text and any(text in part for part in _texts(marks))]
            table = {text: chr(_FIRST + at) for at, text in enumerate(spelled[:_MOST_CONTROL])}
            self._stand_ins = {(control or {})[text]: character for text, character in table.items()}
            self._splitter = ThoughtSplitter(marks.translated(table), inside)
        self._hidden = dict.fromkeys(map(ord, self._stand_ins.values()))

    @property
    def thinking(self) -> bool:
        """Whether the next token belongs to thoughts."""
        return self._splitter is not None and self._splitter.thinking

    @property
    def answering(self) -> bool:
        """Whether the next token belongs to the answer for certain."""
        return self._splitter is None or self._splitter.answering

    @property
    def undecided(self) -> bool:
        """Whether the next token begins the answer, or thoughts."""
        return self._splitter is not None and self._splitter.undecided

    @property
    def beginning(self) -> str:
        """What the answer began with, white space before it left out: all of it after the first token that gave any."""
        return self._beginning

    @property
    def between_characters(self) -> bool:
        """Whether the tokens so far make whole characters."""
        return not self._decoder.getstate()[0]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer (the whole text, where thoughts stay in it), or None."""
        return self._answer.stopped if self._whole is None else self._whole.stopped

    @property
    def answer(self) -> str:
        """The answer so far, without thoughts."""
        return self._answer.text

    @property
    def text(self) -> str:
        """Everything given out as text so far."""
        return self._answer.text if self._whole is None else self._whole.text

    @property
    def reasoning(self) -> str | None:
        """The thoughts so far; None where the template marks none, or the form leaves them in the text."""
        return "".join(self._thoughts) if self._splitter is not None and self._keep_thoughts else None

    def push(self, token: int) -> Piece:
        """What may be shown now that `token` is known."""
        if self._splitter is None:
            return Piece(self._answer.push(token))
        if (stand_in := self._stand_ins.get(token)) is not None:
            text = self._decoder.decode(b"", True) + stand_in
            self._decoder.reset()
        else:
            text = self._decoder.decode(self._token_bytes(token))
        piece = self._shown(*self._splitter.push(text))
        if self._whole is None:
            return piece
        whole = self._whole.push_bytes(self._token_bytes(token, special=token in self._stand_ins))
        return piece._replace(text=whole)

    def finish(self) -> Piece:
        """The rest. Idempotent."""
        if self._splitter is None:
            return Piece(self._answer.finish())
        first = self._splitter.push(self._decoder.decode(b"", True))
        last = self._splitter.finish()
        piece = self._shown(first[0] + last[0], first[1] + last[1])
        piece = piece._replace(text=piece.text + self._answer.finish())
        return piece if self._whole is None else piece._replace(text=self._whole.finish())

    def _shown(self, thoughts: str, answer: str) -> Piece:
        thoughts, answer = thoughts.translate(self._hidden), answer.translate(self._hidden)
        if thoughts:
            self._thoughts.append(thoughts)
        self._beginning = self._beginning or answer
        shown = self._answer.push_bytes(answer.encode("utf-8")) if answer else ""
        return Piece(shown, thoughts if self._keep_thoughts else "")


def _texts(marks: Marks) -> tuple[str, ...]:
    return (marks.open, marks.close, marks.closing, marks.answer)
