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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import TemplateError, UsageError
from .control import ControlText, StandIns
from .messages import Message, check_messages, check_text, check_tools, mapped, strings_in
from .probes import Style, thoughts_open
from .shared_renderer import SharedRenderer
from .template import ChatTemplate, Renderer, RenderRequest

__all__ = ["ControlText", "Message", "Prompt", "StandIns", "Tokenizer", "check_messages", "encode_chat", "encode_raw"]

_SPACE = " \t\n\v\f\r"  # what C's isspace takes


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


def encode_raw(tokenizer: Tokenizer, text: str) -> Prompt:
    """Token ids of `text` as it is. Control tokens may be spelled in it; a start token typed first is not doubled.

    Raises UsageError for text that is not Unicode, and for no text where no start token is added.
    """
    ids = tokenizer.tokenize(_utf8(text, "the prompt"), False, True)
    return Prompt(_finish(tokenizer, ids, tokenizer.add_bos), text)


def encode_part(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text that stands after others: no start token, and what it spells stays text. Raises UsageError
    for no text, or none that is Unicode."""
    if not text:
        raise UsageError("a text to judge, or a label, is empty", "give at least one character")
    return tokens_behind(tokenizer, _utf8(text, "the text"), parse_special=False)


class _Tokenizes(Protocol):
    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]: ...


def tokens_behind(tokenizer: _Tokenizes, text: bytes, *, parse_special: bool) -> list[int]:
    """Token ids of a text that stands behind others: at the start of a text, some vocabularies put a space in front.

    So it is tokenized behind a character that does not melt into it.
    """
    for lead in (b"a", b"\n", b"!", b"0"):
        first, both = (tokenizer.tokenize(part, False, parse_special) for part in (lead, lead + text))
        if both[: len(first)] == first:
            return both[len(first) :]
    return tokenizer.tokenize(text, False, parse_special)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: ChatTemplate,
    *,
    renderer: Renderer | SharedRenderer | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    reasoning: bool | None = None,
) -> Prompt:
    """Token ids of a conversation, laid out by `template`.

    `renderer`: one that was started earlier, to save its start-up time, or with other limits; it is used up, unless it
    is shared.
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
        [mapped(message, stand_ins.hide) for message in messages],
        _text_of(tokenizer, tokenizer.bos_id),
        _text_of(tokenizer, tokenizer.eos_id),
        add_generation_prompt,
        dict(variables or {}),
        [mapped(tool, stand_ins.hide) for tool in tools],
    )
    with renderer or Renderer() as child:
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
