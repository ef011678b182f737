"""The form in which a template wants a conversation: text or parts, arguments as objects or as JSON text, and so on.

Found by rendering: every text is exchanged for a marker, and the form is chosen whose rendering holds the most of them.
Pure; a function that renders is given to it. Invariant: what is in the conversation is in the text, or `lost` names it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ..errors import TemplateError
from .messages import Message
from .survival import survives

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""(messages, variables) → text. Raises `Refusal` when the template refuses or fails; other errors end the search."""

_MOST_TRIES = 64
_SYSTEM = ("system", "developer")
_PART = re.compile(r"""['"]type['"]: ?['"]text['"]""")
_NOTHING = re.compile("None|null")


class Refusal(TemplateError):
    """The template refuses these messages, or fails on them: another form may pass."""


@dataclass(frozen=True)
class Form:
    """How messages are written down. The defaults are what most templates take; `content` "given": as the caller has
    it, strings as strings and parts as parts; `parts_for`: roles whose content is a list of parts in any case."""

    content: str = "given"  # given, text, parts
    parts_for: tuple[str, ...] = ()
    arguments: str = "object"  # object, text
    nothing: str = "none"  # content that is None: none, empty
    reasoning: str = "reasoning_content"
    wrapped_tools: bool = True
    tools_as: str = "tools"  # or another variable's name; functions: as JSON text, with a datetime
    short_ids: bool = False  # 9 letters and digits, as some templates demand
    system_role: bool = False  # developer becomes system
    folded: bool = False  # the system message goes before the first user message


@dataclass(frozen=True)
class Conversation:
    """Messages, tools and the template's further variables."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


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
    whole = _rendered(given, form, render)
    if text is None:
        return Written(whole, form, "", "")
    lost = next(_lost(search, form, text, marked), "") or next(_shortened(given, whole, source), "")
    ends = [text.rfind(leaf.marker) + len(leaf.marker) for leaf in leaves if leaf.marker in text]
    return Written(whole, form, lost, text[max(ends, default=len(text)) :])


def _rendered(given: Conversation, form: Form, render: Render) -> str:
    messages = given.messages
    if form.system_role:
        messages = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
    if form.folded:
        messages = _folded(messages) or messages
    variables = dict(given.variables)
    tools = [_tool(tool, form) for tool in given.tools]
    if form.tools_as == "functions":
        text = json.dumps(tools, ensure_ascii=False, indent=2) if tools else ""
        variables |= {"functions": text, "datetime": f"{datetime.now():%b %d %Y %H:%M:%S}"}
    elif tools:
        variables[form.tools_as] = tools
    return render(as_dicts(messages, form), variables)


def as_dicts(messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
    """The messages as templates see them."""
    ids = _ids(messages) if form.short_ids else {}
    return [_as_dict(m, form, ids, index) for index, m in enumerate(messages)]


def _folded(messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
    if len(messages) < 2 or messages[0].role not in _SYSTEM or messages[1].role != "user":
        return None
    content = "\n".join(messages[0].texts()).strip() + "\n\n" + "\n".join(messages[1].texts())
    return (replace(messages[1], content=content), *messages[2:])


def _as_dict(message: Message, form: Form, ids: Mapping[tuple[int, int], str], index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message, form)}
    if message.tool_calls:
        found["tool_calls"] = [
            _call(call, form, ids.get((index, place))) for place, call in enumerate(message.tool_calls)
        ]
    if (identity := ids.get((index, -1)) or message.tool_call_id) is not None:
        found["tool_call_id"] = identity
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning is not None:
        found[form.reasoning] = message.reasoning
    return found | dict(message.extra)


def _content(message: Message, form: Form) -> object:
    content = message.content
    if content is None:
        return None if form.nothing == "none" else ""
    as_parts = form.content == "parts" or message.role in form.parts_for
    if as_parts or (form.content == "given" and not isinstance(content, str)):
        return [{"type": "text", "text": text} for text in message.texts()]
    return "\n".join(message.texts())


def _call(call: Mapping[str, Any], form: Form, identity: str | None) -> dict[str, Any]:
    function = call.get("function", call)
    others = {} if function is call else {key: value for key, value in call.items() if value is not None}
    if function is call and call.get("id"):
        others = {"id": call["id"]}
    written = _arguments(function.get("arguments"))
    if form.arguments == "text":
        written = json.dumps(written, ensure_ascii=False)
    known = {"type": "function"} | others | {"function": {"name": function["name"], "arguments": written}}
    return known | {"id": identity} if identity else known


def _arguments(given: object) -> Any:
    if isinstance(given, str):
        return json.loads(given) if given.strip() else {}
    return {} if given is None else given


def _tool(tool: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return {"type": "function", "function": function} if form.wrapped_tools else function


def _ids(messages: Sequence[Message]) -> dict[tuple[int, int], str]:
    """(message, call; -1: a result's) → an id of 9 letters and digits; a result without one gets the next call's."""
    found: dict[tuple[int, int], str] = {}
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        for place, call in enumerate(message.tool_calls):
            identity = str(call.get("id") or f"{index}.{place}")
            found[index, place] = _short(identity)
            open_calls.append(identity)
        if message.role == "tool":
            said = message.tool_call_id or (open_calls[0] if open_calls else str(index))
            if said in open_calls:
                open_calls.remove(said)
            found[index, -1] = _short(said)
    return found


def _short(identity: str) -> str:
    fits = len(identity) == 9 and identity.isascii() and identity.isalnum()
    return identity if fits else hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]


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
        arguments = inside(_arguments(function.get("arguments")), name)
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
                self._known[form] = _rendered(self._marked, form, self.render)
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
    if _folded(messages) is not None:
        found.append([{"folded": True}])
    found.append([{"content": "text"}, {"content": "parts"}])
    if any(message.tool_calls for message in messages):
        found.append([{"arguments": "text"}])
    if any(message.content is None for message in messages):
        found.append([{"nothing": "empty"}])
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
        return _rendered(given, form, render)
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
