"""How a conversation is written down for a template: text or parts, arguments as objects or as JSON text, and so on.

Pure; a function that renders is given to it. Invariant: a form changes how things are written, never what is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ..errors import TemplateError
from .messages import Message

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""(messages, variables) → text. Raises `Refusal` when the template refuses or fails; other errors end the search."""

_SYSTEM = ("system", "developer")


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
    single_calls: bool = False  # an answer with several calls becomes one for each, its result behind it
    short_ids: bool = False  # 9 letters and digits, as some templates demand
    system_role: bool = False  # developer becomes system
    folded: bool = False  # the system message goes before the first user message


@dataclass(frozen=True)
class Conversation:
    """Messages, tools and the template's further variables."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


def written(given: Conversation, form: Form, render: Render) -> str:
    messages = given.messages
    if form.system_role:
        messages = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
    if form.folded:
        messages = folded(messages) or messages
    messages = _in_call_order(messages, apart=form.single_calls)
    variables = {**given.variables, **tool_variables(given.tools, form)}
    return render(as_dicts(messages, form), variables)


def _in_call_order(messages: tuple[Message, ...], *, apart: bool) -> tuple[Message, ...]:
    """Results in the order of their calls, as templates without ids need it; `apart`: behind each call its result."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        end = at + 1
        while message.tool_calls and end < len(messages) and messages[end].role == "tool":
            end += 1
        results = list(messages[at + 1 : end])
        ids = [call.get("id") for call in message.tool_calls]
        if all(result.tool_call_id in ids for result in results):
            results.sort(key=lambda result: ids.index(result.tool_call_id))
        if apart and len(ids) > 1 and [result.tool_call_id for result in results] in (ids, [None] * len(ids)):
            for place, (call, result) in enumerate(zip(message.tool_calls, results, strict=True)):
                bare = None if message.content is None else ""
                said = replace(message, content=bare, reasoning=None) if place else message
                found += [replace(said, tool_calls=(call,)), result]
        else:
            found += [message, *results]
        at = end
    return tuple(found)


def tool_variables(tools: Sequence[Mapping[str, Any]], form: Form) -> dict[str, Any]:
    """The variables that hold the tools; none without tools."""
    listed = [_tool(tool, form) for tool in tools]
    if form.tools_as == "functions":
        text = json.dumps(listed, ensure_ascii=False, indent=2) if listed else ""
        return {"functions": text, "datetime": f"{datetime.now():%b %d %Y %H:%M:%S}"}
    return {form.tools_as: listed} if listed else {}


def as_dicts(messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
    """The messages as templates see them."""
    ids = _ids(messages) if form.short_ids else {}
    return [_as_dict(m, form, ids, index) for index, m in enumerate(messages)]


def folded(messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
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
    written = arguments_of(function.get("arguments"))
    if form.arguments == "text":
        written = json.dumps(written, ensure_ascii=False)
    known = {"type": "function"} | others | {"function": {"name": function["name"], "arguments": written}}
    return known | {"id": identity} if identity else known


def arguments_of(given: object) -> Any:
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
