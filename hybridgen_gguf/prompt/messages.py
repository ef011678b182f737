"""Messages of a conversation, checked: what a caller may say, and the plain dictionaries that templates see.

Knows no template and no tokens. Invariant: every key of a message is either carried on or refused by its name; what has
no value (None, an empty list) is absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UsageError

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what servers and templates call it
_KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING)
_DEEPEST = 64  # levels of lists and objects in what a caller gives

Content = str | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Message:
    """One turn. `role`: system, user, assistant, tool, ...; `content`: any text, a list of text parts as in OpenAI's
    API, or None where there is none (an assistant that only calls tools).

    `tool_calls`: as in OpenAI's API, arguments as JSON text or as an object; `tool_call_id` and `name`: of a tool's
    result, or of who speaks; `reasoning`: thoughts of an earlier answer; `extra`: further keys, for the template.
    """

    role: str
    content: Content = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: Message | Mapping[str, Any]) -> Message:
        """From a mapping with OpenAI's keys. Raises UsageError when the role, or both content and calls, are absent."""
        if isinstance(given, Message):
            return given
        if not isinstance(given, Mapping) or "role" not in given:
            raise UsageError("a message needs a role and a content", _EXAMPLE)
        if "content" not in given and not given.get("tool_calls"):
            raise UsageError("a message needs a role and a content", _EXAMPLE)
        said = [str(given[key]) for key in _REASONING if given.get(key)]
        return Message(
            given["role"],
            given.get("content"),
            given.get("tool_calls") or (),
            given.get("tool_call_id"),
            given.get("name"),
            said[0] if said else None,
            {key: value for key, value in given.items() if key not in _KNOWN and _has_value(value)},
        )

    def texts(self) -> list[str]:
        """The texts of the content, in order."""
        if self.content is None:
            return []
        return [self.content] if isinstance(self.content, str) else [part["text"] for part in self.content]


_EXAMPLE = '{"role": "user", "content": "..."}'


def _has_value(value: object) -> bool:
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises UsageError for no messages, a role that is not one word, content that is neither text nor text parts,
    a tool call without a name, or what is not Unicode text."""
    if not messages:
        raise UsageError("there are no messages", "give at least one user message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.role, str) or not _ROLE.fullmatch(message.role):
            raise UsageError(f"{message.role!r:.80} is not a role", "use system, user or assistant")
        where = f"message {number} ({message.role})"
        _check_content(message, where)
        for call in message.tool_calls:
            _check_call(call, where)
        for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
            if value is not None and not isinstance(value, str):
                raise UsageError(f"'{key}' of {where} is {type(value).__name__}, not text")
        check_text(message, f"the {message.role} message")


def _check_content(message: Message, where: str) -> None:
    content = message.content
    if content is None:
        if not message.tool_calls and message.role != "assistant":
            raise UsageError(f"{where} has no content", "give its text; '' for none")
        return
    if isinstance(content, str):
        return
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise UsageError(f"the content of a message is {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, Mapping):
            raise UsageError(f"{where} holds a part that is {type(part).__name__}, not an object", _PART)
        kind = part.get("type", "text")
        if kind != "text":
            raise UsageError(f"{where} holds a part of type '{kind!s:.40}', and only text can be read", _PART)
        if not isinstance(part.get("text"), str):
            raise UsageError(f"{where} holds a text part without a text", _PART)
        others = [key for key, value in part.items() if key not in ("type", "text") and _has_value(value)]
        if others:
            raise UsageError(f"{where} holds a part with '{others[0]!s:.40}', which no template reads", _PART)


_PART = 'a part is {"type": "text", "text": "..."}'
_CALL = '{"type": "function", "function": {"name": "...", "arguments": "{...}"}}'


def _check_call(call: object, where: str) -> None:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(f"'tool_calls' of {where} holds a call without a name", f"a call is {_CALL}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            what = f"'tool_calls' of {where}: the arguments of '{function['name']:.60}' are not JSON"
            raise UsageError(what, f"a call is {_CALL}") from None


def check_text(value: object, name: str) -> None:
    """Raises UsageError where a text in `value` (a Message, or lists and objects) is not Unicode text."""
    for text in strings_in(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{name} is not valid text: half a character at position {error.start}"
            raise UsageError(what, "write it as UTF-8") from None


def strings_in(value: object, depth: int = 0) -> list[str]:
    """All texts in a Message or in lists and objects, keys too."""
    if depth > _DEEPEST:
        raise UsageError(f"a message nests deeper than {_DEEPEST} levels", "flatten it")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Message):
        value = [getattr(value, name) for name in Message.__dataclass_fields__]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [text for item in value for text in strings_in(item, depth + 1)]
    return []


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError for a tool that is no function with a name, or that holds what is not Unicode text."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UsageError("a tool has no name", _TOOL)
        check_text(tool, f"the tool '{function['name']:.60}'")


_TOOL = 'a tool is {"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A Message, or lists and objects, with every text in it changed; keys of a message and roles stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Message):
        return replace(
            value,
            content=mapped(value.content, change),
            tool_calls=[_mapped_call(call, change) for call in value.tool_calls],
            tool_call_id=mapped(value.tool_call_id, change),
            name=mapped(value.name, change),
            reasoning=mapped(value.reasoning, change),
            extra={key: mapped(item, change) for key, item in value.extra.items()},
        )
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: mapped(item, change) for key, item in value.items()}
    return [mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _mapped_call(call: Mapping[str, Any], change: Callable[[str], str]) -> Any:
    """A call's arguments are JSON text: what they hold is changed, not how it is written."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        function = {**function, "arguments": json.loads(arguments)}
    return mapped({**call, "function": function} if "function" in call else function, change)
