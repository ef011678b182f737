"""What a template tells about answers: how it ends one, and where thoughts stand. Found by rendering small chats.

Knows no names of models; a function that renders is given to it. Invariant: a template that cannot be asked (it
refuses, or shows no thoughts) gives an empty answer, never a guess from its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .forms import Form, Refusal, Render, as_dicts, tool_variables
from .messages import Message
from .reasoning import KNOWN, MARK, Marks

_ON = {"enable_thinking": True, "thinking": True}
_OFF = {"enable_thinking": False, "thinking": False}
_SWITCHES = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("reasoning", True, False),
)
_AFTER = 160  # characters behind an answer that may hold its end


@dataclass(frozen=True)
class Style:
    """`ends`: what the template writes right after an answer; `marks`: around thoughts, None without any; `on`, `off`:
    the variables that make the model think, or not."""

    ends: tuple[str, ...] = ()
    marks: Marks | None = None
    on: Mapping[str, Any] | None = None
    off: Mapping[str, Any] | None = None


def style_of(render: Render, source: str, mark: str, form: Form, variables: Mapping[str, Any]) -> Style:
    """`source`: the template; `mark`: a word that it does not hold; `form`: how it wants messages."""
    probe = _Probe(render, mark, form, variables)
    marks = _shown_marks(probe) or _known_marks(probe, source)
    on, off = _switches(probe)
    return Style(_ends(probe), marks, on, off)


def thoughts_open(tail: str, marks: Marks) -> bool:
    """Whether the prompt, which ends with `tail`, has opened the thoughts."""
    return tail.rfind(marks.open) > tail.rfind(marks.close) if marks.open in tail else False


class _Probe:
    """Renders a question and perhaps an answer."""

    def __init__(self, render: Render, mark: str, form: Form, variables: Mapping[str, Any]) -> None:
        self._render, self._form, self._variables = render, form, {**variables, **tool_variables((), form)}
        self.user, self.answer, self.thought = f"{mark}u", f"{mark}a", f"{mark}t"

    def text(self, *more: Mapping[str, Any], prompt: bool = False, variables: Mapping[str, Any] | None = None) -> str:
        """What follows the question: `more` messages, and the beginning of an answer (`prompt`). "" if refused."""
        return self.whole({**(variables or {}), "add_generation_prompt": prompt}, *more).rpartition(self.user)[2]

    def whole(self, variables: Mapping[str, Any], *more: Mapping[str, Any]) -> str:
        """All that is rendered. "" if refused."""
        asked = self.turn(Message("user", self.user))
        try:
            return self._render([asked, *more], {**self._variables, **variables})
        except Refusal:
            return ""

    def turn(self, message: Message) -> Mapping[str, Any]:
        return as_dicts((message,), self._form)[0]


def _ends(probe: _Probe) -> tuple[str, ...]:
    """What stands behind an answer, when nothing and when a further question follows."""
    answered = probe.turn(Message("assistant", probe.answer))
    again = probe.turn(Message("user", f"{probe.thought}2"))
    found = []
    for text in (probe.text(answered), probe.text(answered, again)):
        _, there, after = text.partition(probe.answer)
        after = after.partition(probe.thought)[0][:_AFTER].lstrip()
        if there and after:
            found.append(after)
    return tuple(dict.fromkeys(found))


def _shown_marks(probe: _Probe) -> Marks | None:
    """From an answer with thoughts, in any of the ways in which templates take them."""
    plain = probe.turn(Message("assistant", probe.answer))
    parts = [{"type": "thinking", "thinking": probe.thought}, {"type": "text", "text": probe.answer}]
    ways: list[Mapping[str, Any]] = [
        {**plain, key: probe.thought} for key in ("reasoning_content", "thinking", "reasoning")
    ]
    ways.append({**plain, "content": parts})
    for variables in ({}, _ON):
        for way in ways:
            text = probe.text(way, variables=variables)
            before, there, after = text.partition(probe.thought)
            between, answered, _ = after.partition(probe.answer)
            if there and answered and (marks := _marks(probe, before, between, variables)):
                return marks
    return None


def _marks(probe: _Probe, before: str, between: str, variables: Mapping[str, Any]) -> Marks | None:
    closes = MARK.match(between.lstrip())
    if not closes:
        return None
    begun = probe.text(prompt=True, variables=variables)
    without = probe.text(probe.turn(Message("assistant", probe.answer)), variables=variables).partition(probe.answer)[0]
    quiet = probe.text(prompt=True, variables=_OFF)
    header = begun if before.startswith(begun) and begun != before else ""
    if not header:  # the prompt itself opens the thoughts: see what it is without
        header = max(
            (_shared(before, other) for other in (without, quiet) if not other.startswith(before)), key=len, default=""
        )
    opening = before[len(header) :].strip() if header else ""
    if not opening or not MARK.search(opening):
        found = list(MARK.finditer(before))
        opening = found[-1][0] if found and not before[found[-1].end() :].strip() else ""
    if not opening:
        return None
    answer = without[len(header) :].strip() if header and without.startswith(header) else ""
    answer = "" if opening in answer or closes[0] in answer or not MARK.search(answer) else answer
    return Marks(opening, closes[0], between, answer)


def _shared(one: str, other: str) -> str:
    """The common beginning of both, up to the start of a mark in which, or in whose words, they part."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    starts = [found.start() for found in MARK.finditer(one) if found.start() < size < found.end()]
    if starts:
        return one[: starts[0]]
    rest = one[size:].lstrip()
    if MARK.match(rest):
        return one[:size]
    earlier = [found.start() for found in MARK.finditer(one) if found.end() <= size]
    return one[: earlier[-1]] if earlier else ""


def _known_marks(probe: _Probe, source: str) -> Marks | None:
    """Public marks that the template spells, or that its prompt for an answer ends with."""
    begun = probe.text(prompt=True).rstrip()
    for marks in KNOWN:
        spelled = marks.close in source
        if marks.answer:  # the end of any message: its opening must be there as well
            spelled = spelled and all(piece in source for piece in ("<|channel|>", "analysis"))
        if spelled or begun.endswith(marks.open):
            return marks
    return None


def _switches(probe: _Probe) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The variables that change how an answer begins, or what stands before it."""
    for name, on, off in _SWITCHES:
        texts = [probe.whole({name: value}) for value in (on, off)]
        if texts[0] != texts[1]:
            return {name: on}, {name: off}
    return None, None
