"""Thoughts and answer in what a model writes, by the marks of its chat template. Pure; knows no template and no tokens.

Text only counts as thoughts where a model puts them: at the very start of its answer (or where the prompt opened them),
and again only behind the template's own header of a further message. Invariant: however the text is cut into pieces,
the pieces joined are `split(text)`; text without marks in those places comes out whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK = re.compile(r"<[|｜][^<>|｜\n]{1,48}[|｜]>|<[^<>\s]{1,48}>|\[/?[A-Z][A-Z_ ]{2,40}\]|◁/?[^◁▷\s]{1,20}▷")
"""What looks like a mark of a template: <think>, </s>, <|end|>, <｜Assistant｜>, [/THINK]."""


@dataclass(frozen=True)
class Marks:
    """Around thoughts. `open`, `close`: the marks themselves; `closing`: all that the model writes between its thoughts
    and its answer, white space too; `answer`: what it writes before an answer without thoughts (mostly nothing)."""

    open: str
    close: str
    closing: str
    answer: str = ""

    @property
    def between(self) -> str:
        """What follows `close` before the answer, without white space around it."""
        return self.closing.strip().removeprefix(self.close).strip()

    def translated(self, table: dict[str, str]) -> Marks:
        """With some spellings exchanged: for control tokens, which the model writes as one token."""

        def other(text: str) -> str:
            for spelled in sorted(table, key=len, reverse=True):
                text = text.replace(spelled, table[spelled])
            return text

        return Marks(other(self.open), other(self.close), other(self.closing), other(self.answer))


# Public marks, for templates that only cut thoughts away or leave them to the model.
_HARMONY = "<|start|>assistant<|channel|>final<|message|>"
KNOWN = (
    *(
        Marks(f"<{name}>", f"</{name}>", f"\n</{name}>\n\n")
        for name in (
            "think", "thinking", "thought", "thoughts", "reasoning", "reason", "seed:think", "mm:think", "reflection",
            "scratchpad",
        )
    ),
    Marks("[THINK]", "[/THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>", "<|inner_suffix|>"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>", "<|end_of_thought|>"),
    Marks("<|think|>", "<|/think|>", "<|/think|>"),
    Marks("◁think▷", "◁/think▷", "◁/think▷"),
    Marks("<|channel>thought", "<channel|>", "<channel|>"),
    Marks("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{_HARMONY}", "<|channel|>final<|message|>"),
)  # fmt: skip


def split(text: str, marks: Marks, inside: bool = False) -> tuple[str, str]:
    """(thoughts, answer) of a whole text."""
    splitter = ThoughtSplitter(marks, inside)
    first, last = splitter.push(text), splitter.finish()
    return first[0] + last[0], first[1] + last[1]


class ThoughtSplitter:
    """Splits text as it comes. White space around thoughts, and before an answer that follows thoughts, is dropped."""

    def __init__(self, marks: Marks, inside: bool = False) -> None:
        """`inside`: the prompt has opened the thoughts already."""
        self._close = marks.close
        self._held = ""
        self._state = "thoughts" if inside else "start"  # start, thoughts, after, space, answer
        self._earlier = False  # an earlier message held thoughts
        self._begun = False  # this one does
        header = marks.between.removesuffix(marks.answer) if marks.answer else ""
        again = header + marks.open if header else ""
        self._literals = {
            "start": _given((marks.open, "thoughts"), (marks.answer, "space")),
            "after": _given((marks.between, "space"), (marks.answer, "space"), (again, "thoughts")),
        }

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside thoughts."""
        return self._state == "thoughts"

    @property
    def closed(self) -> bool:
        """Whether thoughts, or the lack of them, are behind: what comes is answer, but perhaps for a header."""
        return self._state in ("after", "space", "answer")

    @property
    def undecided(self) -> bool:
        """Whether thoughts may begin here or the answer, without a header of the template before it."""
        return self._state == "start" and len(self._literals["start"]) == 1

    @property
    def answering(self) -> bool:
        """Whether what comes next is the answer, and no header of the template before it."""
        return self._state in ("space", "answer") or (self._state == "after" and not self._literals["after"])

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that are certain now."""
        self._held += text
        thoughts = ""
        while True:
            state = self._state
            if state == "answer":
                answer, self._held = self._held, ""
                return thoughts, answer
            if state == "thoughts":
                thoughts += self._think()
            elif state == "space":
                self._held = self._held.lstrip()
                self._state = "answer" if self._held else "space"
            else:
                self._begin(self._literals[state])
            if self._state == state:
                return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """The rest: thoughts that were cut short, what only looked like the beginning of a mark; a header of the
        template that was cut is dropped."""
        held, self._held = self._held, ""
        if self._state == "thoughts":
            return self._said(held.rstrip()), ""
        return "", held if self._state in ("start", "answer") else ""

    def _begin(self, literals: tuple[tuple[str, str], ...]) -> None:
        """Looks for one of the literals at the start of what is held; without one, the answer begins here."""
        text = self._held.lstrip()
        for literal, state in literals:
            if text.startswith(literal):
                self._held, self._state = text[len(literal) :], state
                return
        if not text or any(literal.startswith(text) for literal, _ in literals):
            return
        self._state = "answer" if self._state == "start" else "space"

    def _think(self) -> str:
        found = self._held.find(self._close)
        if found >= 0:
            said = self._said(self._held[:found].rstrip())
            self._held = self._held[found + len(self._close) :]
            self._state, self._earlier, self._begun = "after", self._earlier or self._begun, False
            return said
        kept = len(self._held) - _overlap(self._held, self._close)
        part = self._held[:kept].rstrip()
        self._held = self._held[len(part) :]
        return self._said(part)

    def _said(self, part: str) -> str:
        if not self._begun:
            part = part.lstrip()
            if part and self._earlier:
                self._begun = True
                return "\n" + part
        self._begun = self._begun or bool(part)
        return part


def _given(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in pairs if pair[0])


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
