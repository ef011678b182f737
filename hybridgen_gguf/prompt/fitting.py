"""The form in which a template wants a conversation, found by rendering: every text is exchanged for a marker, and the
form is chosen whose rendering holds the most of them.

Pure; a function that renders is given to it. Invariant: what is in the conversation is in the text, or `lost` names it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .forms import Conversation, Form, Refusal, Render, arguments_of, folded, written
from .messages import Message
from .survival import survives

_MOST_TRIES = 64
_PART = re.compile(r"""['"]type['"]: ?['"]text['"]""")
_NOTHING = re.compile("None|null")


@dataclass(frozen=True)
class Leaf:
    """A text of the conversation: its marker and what to call it; `optional`: templates drop it on purpose."""

    marker: str
    name: str
    optional: bool = False


@dataclass(frozen=True)
class Written:
    """The rendered text, the form it was made with, and what got lost (empty: nothing)."""

    text: str
    form: Form
    lost: str
    tail: str  # what the template writes after the conversation


def write(given: Conversation, render: Render, mark: str, source: str, known: Form | None = None) -> Written:
    """Renders the conversation in the form that keeps most of it. `mark`: a word that occurs nowhere in it; `source`:
    the template. Raises what `render` raises for the conversation itself when no form passes."""
    marked, leaves = _marked(given, mark)
    search = _Search(marked, leaves, render, source)
    form, text = search.best(known or Form())
    whole = written(given, form, render)
    if text is None:
        return Written(whole, form, "", "")
    lost = next(_lost(search, form, text, marked), "") or next(_shortened(given, whole, source), "")
    ends = [text.rfind(leaf.marker) + len(leaf.marker) for leaf in leaves if leaf.marker in text]
    return Written(whole, form, lost, text[max(ends, default=len(text)) :])


# --- markers ---


def _marked(given: Conversation, mark: str) -> tuple[Conversation, list[Leaf]]:
    """The conversation with a marker for every text that must arrive, and the markers."""
    leaves: list[Leaf] = []
    names: dict[str, str] = {}

    def leaf(text: str, name: str, optional: bool = False) -> str:
        if not text.strip():
            return text
        leaves.append(Leaf(f"{mark}{len(leaves):x}z", name, optional))
        return leaves[-1].marker

    def named(text: str, name: str, optional: bool = False) -> str:
        if text not in names:
            names[text] = leaf(text, name, optional)
        return names[text]

    def inside(value: Any, name: str) -> Any:
        if isinstance(value, str):
            return leaf(value, name)
        if isinstance(value, Mapping):
            return {key: inside(item, name) for key, item in value.items()}
        return [inside(item, name) for item in value] if isinstance(value, (list, tuple)) else value

    tools = tuple(_marked_tool(tool, named) for tool in given.tools)
    messages = tuple(_marked_message(m, n, leaf, named, inside) for n, m in enumerate(given.messages, 1))
    return replace(given, messages=messages, tools=tools), leaves


def _marked_tool(tool: Mapping[str, Any], named: Callable[..., str]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {"function": {**function, "name": named(function["name"], "'tools'")}}


def _marked_message(
    message: Message,
    number: int,
    leaf: Callable[..., str],
    named: Callable[..., str],
    inside: Callable[[Any, str], Any],
) -> Message:
    where = f"message {number} ({message.role})"
    texts = [{"type": "text", "text": leaf(text, f"the content of {where}")} for text in message.texts()]
    is_text = isinstance(message.content, str)
    calls = []
    for call in message.tool_calls:
        function = call.get("function", call)
        name = f"'tool_calls' of {where}"
        arguments = inside(arguments_of(function.get("arguments")), name)
        outer = call if function is not call else {"id": call.get("id")}
        calls.append({**outer, "function": {"name": leaf(function["name"], name), "arguments": arguments}})
    # A result's name only repeats what its call says; anyone else's says who speaks.
    repeated = message.role == "tool"
    return replace(
        message,
        content=None if message.content is None else texts[0]["text"] if is_text else texts,
        tool_calls=tuple(calls),
        name=None if message.name is None else named(message.name, f"'name' of {where}", repeated),
        reasoning=None if message.reasoning is None else leaf(message.reasoning, "thoughts", True),
    )


# --- the search ---


class _Search:
    """Tries forms of one marked conversation, each once."""

    def __init__(self, marked: Conversation, leaves: Sequence[Leaf], render: Render, source: str) -> None:
        self._marked = marked
        self._source = source
        self.leaves = leaves
        self.render = render
        self._known: dict[Form, str | None] = {}

    def best(self, first: Form) -> tuple[Form, str | None]:
        """The form that loses least, and its text; None when the template refuses every form."""
        choices = _choices(self._marked, self._source)
        best = self._better(first, choices)
        if self._score(best)[0]:  # two things at once may be in the way
            for combined in itertools.islice(itertools.product(*([{}, *options] for options in choices)), _MOST_TRIES):
                tried = replace(first, **{k: v for changes in combined for k, v in changes.items()})
                if not self._score(tried)[0]:
                    best = self._better(tried, choices)
                    break
        return best, self.text(best)

    def _better(self, best: Form, choices: Sequence[Sequence[Mapping[str, Any]]]) -> Form:
        """`best` with every single change that loses less."""
        for changes in itertools.chain.from_iterable(choices):
            if self._score(best) == (False, 0, 0, 0):
                break
            tried = replace(best, **changes)
            if self._score(tried) < self._score(best):
                best = tried
        return best

    def text(self, form: Form) -> str | None:
        if form not in self._known:
            try:
                self._known[form] = written(self._marked, form, self.render)
            except Refusal:
                self._known[form] = None
        return self._known[form]

    def _score(self, form: Form) -> tuple[bool, int, int, int]:
        """Smaller is better: refused; texts lost; what was written as a program would; thoughts lost."""
        text = self.text(form)
        if text is None:
            return True, 0, 0, 0
        lost = [leaf for leaf in self.leaves if leaf.marker not in text]
        needed = sum(not leaf.optional for leaf in lost)
        needed += len(_PART.findall(text))  # parts written as a program would are no better than lost
        return False, needed, self._oddities(text), sum(leaf.name == "thoughts" for leaf in lost)

    def _oddities(self, text: str) -> int:
        found = 0
        for message in self._marked.messages:
            for call in message.tool_calls:
                arguments = call["function"]["arguments"]
                quoted = json.dumps(json.dumps(arguments, ensure_ascii=False))
                found += bool(arguments) and (repr(arguments) in text or quoted in text)
            found += message.content is None and bool(_NOTHING.search(text))
        return found


def _choices(marked: Conversation, source: str) -> list[list[dict[str, Any]]]:
    """For each thing that a template may want otherwise, the other ways; only those that matter here."""
    messages = marked.messages
    roles = tuple(dict.fromkeys(message.role for message in messages))
    found: list[list[dict[str, Any]]] = []
    if "developer" in roles:
        found.append([{"system_role": True}])
    if folded(messages) is not None:
        found.append([{"folded": True}])
    found.append([{"content": "text"}, {"content": "parts"}])
    if any(message.tool_calls for message in messages):
        found.append([{"arguments": "text"}])
    if any(message.content is None for message in messages):
        found.append([{"nothing": "empty"}])
    if any(len(message.tool_calls) > 1 for message in messages):
        found.append([{"single_calls": True}])
    if any(message.tool_calls or message.role == "tool" for message in messages):
        found.append([{"short_ids": True}])
    if marked.tools:
        found.append([{"wrapped_tools": False}])
    found.append([{"tools_as": name} for name in ("xml_tools", "functions") if re.search(rf"\b{name}\b", source)])
    if len(roles) > 1:
        but_one = [tuple(role for role in roles if role != left) for left in roles] if len(roles) > 2 else []
        found.append([{"content": "text", "parts_for": some} for some in (*((role,) for role in roles), *but_one)])
    if any(message.reasoning for message in messages):
        found.append([{"reasoning": "thinking"}, {"reasoning": "reasoning"}])
    return [options for options in found if options]


def _lost(search: _Search, form: Form, text: str, marked: Conversation) -> Iterator[str]:
    """Names of what does not change the rendering at all: texts whose marker is missing, and unknown keys."""
    for leaf in [leaf for leaf in search.leaves if not leaf.optional and leaf.marker not in text][:_MOST_TRIES]:
        other = _exchanged(marked, leaf.marker)
        if _try(other, form, search.render) == text:
            yield leaf.name
    keys = dict.fromkeys(key for message in marked.messages for key, value in message.extra.items() if value)
    for key in list(keys)[:_MOST_TRIES]:
        without = tuple(
            replace(m, extra={k: v for k, v in m.extra.items() if k != key}) if key in m.extra else m
            for m in marked.messages
        )
        if _try(replace(marked, messages=without), form, search.render) == text:
            number, message = next((n, m) for n, m in enumerate(marked.messages, 1) if key in m.extra)
            yield f"'{key}' of message {number} ({message.role})"


def _try(given: Conversation, form: Form, render: Render) -> str | None:
    try:
        return written(given, form, render)
    except Refusal:
        return None


def _exchanged(marked: Conversation, marker: str) -> Conversation:
    """The conversation with another, longer text in the place of `marker`: does the rendering depend on it?"""

    def other(value: Any) -> Any:
        if isinstance(value, str):
            return f"other{marker}text" if value == marker else value
        if isinstance(value, Mapping):
            return {key: other(item) for key, item in value.items()}
        return [other(item) for item in value] if isinstance(value, (list, tuple)) else value

    messages = tuple(
        replace(m, content=other(m.content), tool_calls=other(m.tool_calls), name=other(m.name))
        for m in marked.messages
    )
    return replace(marked, messages=messages, tools=tuple(other(list(marked.tools))))


def _shortened(given: Conversation, text: str, source: str) -> Iterator[str]:
    """Names of texts of which the template writes a part alone. Answers may lose their thoughts."""
    for number, message in enumerate(given.messages, 1):
        if message.role != "assistant" and not all(survives(part, text, source) for part in message.texts()):
            yield f"a part of message {number} ({message.role})"
