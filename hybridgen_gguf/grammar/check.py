"""A grammar or a JSON schema → rules that this process may compile, or one line that says what is wrong and where.

The engine's parser can overflow its stack and loop, so a child with limits goes first. What was checked is remembered.
Invariant: a text that was never compiled in a child is never compiled here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..engine.child import Child
from ..engine.grammar import Grammar
from ..engine.handles import Model
from ..errors import SampleError, UsageError
from ..printable import printable
from .guard import Guard
from .schema import LONGEST, prepared

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.DOTALL)

_TOO_COMPLEX = "too deep or too complex"
_UNDEFINED = "Undefined rule identifier "


class Vocabulary(Protocol):
    """What is needed of a model's vocabulary (vocabulary.Vocabulary)."""

    @property
    def end_tokens(self) -> frozenset[int]: ...
    def control_tokens(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Checked:
    """A grammar (GBNF) that a child has compiled; `without_effect`: what of a JSON schema it leaves out."""

    text: str
    without_effect: tuple[str, ...] = ()

    def guard(
        self, model: Model, vocabulary: Vocabulary, ends: frozenset[int], opening: int | None, *, ignore_end: bool
    ) -> Guard:
        """A follower of one answer of `model`. `ends`: tokens that end one beside the engine's; others: as Guard."""
        control = () if names_tokens(self.text) else vocabulary.control_tokens().values()
        every = ends | vocabulary.end_tokens
        return Guard(Grammar(model, self.text), control=control, ends=every, opening=opening, ignore_end=ignore_end)


def names_tokens(grammar: str) -> bool:
    """Whether a grammar has elements that are tokens (<name>, <[id]>, !<name>), not characters."""
    rest = _QUOTED.sub(" ", grammar)
    return "<" in rest or "!" in rest


_MOST_KNOWN = 32
_known: dict[tuple[Path, str | None, str | None], Checked] = {}


def checked(path: Path, grammar: str | None, schema: str | None) -> Checked:
    """The rules for the vocabulary of the model at `path`. One of `grammar` and `schema` is given.

    Raises UsageError for what cannot be used, EngineError for an engine without grammars.
    """
    key = (path, grammar, schema)
    if key not in _known:
        rules = _compiled(path, grammar, schema)
        while len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = rules
        _known[path, rules.text, None] = Checked(rules.text)
    return _known[key]


def _compiled(path: Path, grammar: str | None, schema: str | None) -> Checked:
    text, what = (schema, "JSON schema") if schema is not None else (grammar or "", "grammar")
    _check_text(text, what)
    lost: tuple[str, ...] = ()
    if schema is not None:
        text, lost = prepared(schema)
    with Child(timeout=60.0) as child:
        try:
            made, incomplete = child.grammar(path, text, is_schema=schema is not None)
        except (UsageError, SampleError) as error:
            why = _TOO_COMPLEX if isinstance(error, SampleError) else error.what
            raise (schema_problem(why) if schema is not None else grammar_problem(why, text)) from None
    return Checked(made, (*lost, *((printable(incomplete, limit=200),) if incomplete else ())))


def _check_text(text: str, what: str) -> None:
    if not text.strip():
        raise UsageError(f"the {what} is empty", "leave it out for an answer of any form")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise UsageError(f"the {what} is not Unicode text", "write it as UTF-8") from None
    if size > LONGEST:
        raise UsageError(f"the {what} holds more than {LONGEST >> 20} MiB", "shorten it")
    if "\0" in text:
        raise UsageError(f"the {what} holds a character NUL", "leave it out")


def grammar_problem(message: str, text: str) -> UsageError:
    """The parser's `message` about the grammar `text`, with the place: it gives that as the rest of the text."""
    at = next((n for n in _found(message, " at ") if text.endswith(message[n + 4 :])), None)
    if at is not None:
        place = len(text) - len(message[at + 4 :])
        return _problem(f"{message[:at]} at {_line_and_column(text, place)}")
    if message.startswith(_UNDEFINED):
        name = message.removeprefix(_UNDEFINED).strip("'")
        found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        return _problem(f"there is no rule {name}, named at {_line_and_column(text, found.start() if found else 0)}")
    if message == "unexpected end of input":
        return _problem(f"unexpected end at {_line_and_column(text, len(text))}")
    if message.startswith("no rule named"):
        return UsageError(f"the grammar has {message}", "the rule to begin with is called root: root ::= ...")
    if message.startswith("no rules"):
        return UsageError("the grammar has no rules", "the rule to begin with is called root: root ::= ...")
    return _problem(printable(message, limit=200))


def schema_problem(message: str) -> UsageError:
    """The converter's `message` in one line."""
    words = " ".join(message.replace("JSON schema conversion failed:", "").replace("JSON schema error", "").split())
    return UsageError(
        f"the JSON schema cannot be used: {printable(words, limit=200)}", "see the JSON schema that was given"
    )


def _problem(what: str) -> UsageError:
    return UsageError(f"the grammar cannot be used: {what}", 'for example root ::= "yes" | "no"')


def _found(text: str, part: str) -> list[int]:
    places, start = [], text.find(part)
    while start >= 0:
        places.append(start)
        start = text.find(part, start + 1)
    return places


def _line_and_column(text: str, place: int) -> str:
    before = text[:place]
    return f"line {before.count(chr(10)) + 1}, column {place - before.rfind(chr(10))}"
