"""Messages or text → token ids. Knows no context, no model file and no sampling; a tokenizer is given to it.

Invariants: a prompt has exactly one start token where the model wants one, and never two; the text of a control token
inside a message stays text (what the chat template writes, and raw text, may hold control tokens).

How user text stays text: in every message, the first character of whatever spells a control token is exchanged for a
stand-in, a private-use character drawn at random for this prompt. Templates may trim, split or repeat contents as they
like, since the stand-in travels with the text. The engine finds the template's own control tokens alone, and the text
between them is tokenized, with the stand-ins turned back, as plain text: exactly the partition the engine itself makes.
Without such text in any message, the whole is given to the tokenizer as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import TemplateError, UsageError
from .messages import Message, check_messages, check_text, strings_in
from .probes import Style, thoughts_open
from .template import ChatTemplate, Renderer, RenderLimits, RenderRequest

__all__ = ["ControlText", "Message", "Prompt", "StandIns", "Tokenizer", "check_messages", "encode_chat", "encode_raw"]

_SPACE = " \t\n\v\f\r"  # what C's isspace takes
_PRIVATE_FIRST, _PRIVATE_COUNT = 0xF0000, 0xFFFE  # Unicode's private-use plane 15

_LONGEST_TAIL = 256  # characters; a bound on the work an absurd vocabulary can cause


class Tokenizer(Protocol):
    """A model's vocabulary."""

    @property
    def bos_id(self) -> int | None:
        """The start token, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """The end token, if there is one."""

    @property
    def add_bos(self) -> bool:
        """Whether the model wants a start token."""

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of UTF-8 `text`; `parse_special`: text that spells a control token becomes that token."""

    def token_text(self, token: int) -> str:
        """How the vocabulary spells `token`."""

    def control_tokens(self) -> Mapping[str, int]:
        """Spelling → id of all control and unknown tokens: those `parse_special` alone recognises."""


@dataclass(frozen=True)
class Prompt:
    """Token ids; the text they stand for (without a start token of the tokenizer); the template's origin, or None if
    raw; whether the system message was moved into the first user message.

    `style`: what the template tells about answers, empty if raw; `thinking`: the prompt has opened the thoughts.
    """

    tokens: tuple[int, ...]
    text: str
    template: str | None = None
    system_folded: bool = False
    style: Style = field(default_factory=Style)
    thinking: bool = False


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


def encode_raw(tokenizer: Tokenizer, text: str) -> Prompt:
    """Token ids of `text` as it is. Control tokens may be spelled in it; a start token typed first is not doubled.

    Raises UsageError for text that is not Unicode, and for no text where no start token is added.
    """
    ids = tokenizer.tokenize(_utf8(text, "the prompt"), False, True)
    return Prompt(_finish(tokenizer, ids, tokenizer.add_bos), text)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: ChatTemplate,
    *,
    renderer: Renderer | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    reasoning: bool | None = None,
    limits: RenderLimits | None = None,
) -> Prompt:
    """Token ids of a conversation, laid out by `template`.

    `renderer`: one that was started earlier, to save its start-up time (its limits count); it is used up.
    `tools`: functions as in OpenAI's API; `variables`: further names for the template; `reasoning`: whether the model
    is to think, by the template's own switch if it has one. Raises UsageError for messages that can't be used,
    TemplateError for a template that fails, costs more than the limits or loses something of the conversation.
    """
    check_messages(messages)
    check_tools(tools)
    control = ControlText(tokenizer.control_tokens())
    stand_ins = StandIns(control, [template.source, *strings_in([*messages, *tools, dict(variables or {})])])
    request = RenderRequest(
        template.source,
        [_mapped(message, stand_ins.hide) for message in messages],
        _text_of(tokenizer, tokenizer.bos_id),
        _text_of(tokenizer, tokenizer.eos_id),
        add_generation_prompt,
        dict(variables or {}),
        [_mapped(tool, stand_ins.hide) for tool in tools],
    )
    with renderer or Renderer(limits) as child:
        rendered = child.render(request)
        style = child.style(request)
        switch = None if reasoning is None else style.on if reasoning else style.off
        if switch:
            rendered = child.render(replace(request, variables={**switch, **request.variables}))
    written = stand_ins.unescaped(rendered.text)
    try:
        ids = tokenize_rendered(tokenizer, written, control, stand_ins)
    except UnicodeEncodeError:
        raise TemplateError("the chat template writes half a character", "use --raw or --chat-template") from None
    if rendered.lost:
        what = f"the chat template has no place for {rendered.lost}"
        raise TemplateError(what, "leave it out, or use another template with --chat-template")
    text = stand_ins.restore(written)
    # A template that writes a start token anywhere, be it after a space, sees to it itself; user text never spells one.
    add_start = tokenizer.add_bos and tokenizer.bos_id not in ids
    thinking = style.marks is not None and add_generation_prompt and thoughts_open(rendered.tail, style.marks)
    tokens = _finish(tokenizer, ids, add_start)
    return Prompt(tokens, text, template.origin, rendered.system_folded, style, thinking)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError for a tool that is no function with a name, or that holds what is not Unicode text."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UsageError("a tool has no name", _TOOL)
        check_text(tool, f"the tool '{function['name']:.60}'")


_TOOL = 'a tool is {"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A Message, or lists and objects, with every text in it changed; keys of a message and roles stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Message):
        return replace(
            value,
            content=_mapped(value.content, change),
            tool_calls=[_mapped_call(call, change) for call in value.tool_calls],
            tool_call_id=_mapped(value.tool_call_id, change),
            name=_mapped(value.name, change),
            reasoning=_mapped(value.reasoning, change),
            extra={key: _mapped(item, change) for key, item in value.extra.items()},
        )
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _mapped_call(call: Mapping[str, Any], change: Callable[[str], str]) -> Any:
    """A call's arguments are JSON text: what they hold is changed, not how it is written."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        function = {**function, "arguments": json.loads(arguments)}
    return _mapped({**call, "function": function} if "function" in call else function, change)


def tokenize_rendered(tokenizer: Tokenizer, text: str, control: ControlText, stand_ins: StandIns) -> list[int]:
    """Ids of rendered text, control tokens recognised outside stand-ins only; no start token added."""
    if not stand_ins.occur_in(text):
        return tokenizer.tokenize(text.encode("utf-8"), False, True)
    pieces = control.partition(text)
    ids: list[int] = []
    for index, (piece, token) in enumerate(pieces):
        if token is not None:
            ids.append(token)
            continue
        before = pieces[index - 1] if index else None
        after = pieces[index + 1] if index + 1 < len(pieces) else None
        if before is not None and _swallows(tokenizer, before, "", "\n"):
            piece = piece.lstrip(_SPACE)
        if after is not None and _swallows(tokenizer, after, "\n", ""):
            piece = piece.rstrip(_SPACE)
        ids += tokenizer.tokenize(stand_ins.restore(piece).encode("utf-8"), False, False) if piece else []
    return ids


def _swallows(tokenizer: Tokenizer, piece: tuple[str, int | None], before: str, after: str) -> bool:
    """Whether a control token takes the white space next to it away, as some of Phi's do; found by trying."""
    text, token = piece
    return token is not None and tokenizer.tokenize((before + text + after).encode("utf-8"), False, True) == [token]


def _finish(tokenizer: Tokenizer, ids: list[int], add_start: bool) -> tuple[int, ...]:
    """Exactly one start token at the beginning where the text has some or `add_start`."""
    start = tokenizer.bos_id
    if start is not None:
        leading = next((at for at, token in enumerate(ids) if token != start), len(ids))
        wanted = 1 if leading or add_start else 0
        ids = [start] * wanted + ids[leading:]
    if not ids:
        raise UsageError("the prompt is empty", "give some text with -p, -f or on standard input")
    return tuple(ids)


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _utf8(text: str, name: str) -> bytes:
    check_text(text, name)
    return text.encode("utf-8")
