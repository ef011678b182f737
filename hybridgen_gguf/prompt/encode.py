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

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import TemplateError, UsageError
from .template import ChatTemplate, Renderer, RenderLimits, RenderRequest

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
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
class Message:
    """One turn. `role`: system, user, assistant, tool, ...; `content`: any text."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """Token ids; the text they stand for (without a start token of the tokenizer); the template's origin, or None if
    raw; whether the system message was moved into the first user message."""

    tokens: tuple[int, ...]
    text: str
    template: str | None = None
    system_folded: bool = False


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
    variables: Mapping[str, Any] | None = None,
    limits: RenderLimits | None = None,
) -> Prompt:
    """Token ids of a conversation, laid out by `template`.

    `renderer`: one that was started earlier, to save its start-up time (its limits count); it is used up.
    `variables`: further names for the template. Raises UsageError for messages that can't be used, TemplateError for a
    template that fails or costs more than the limits.
    """
    check_messages(messages)
    control = ControlText(tokenizer.control_tokens())
    stand_ins = StandIns(control, [template.source, *(message.content for message in messages)])
    request = RenderRequest(
        template.source,
        [{"role": message.role, "content": stand_ins.hide(message.content)} for message in messages],
        _text_of(tokenizer, tokenizer.bos_id),
        _text_of(tokenizer, tokenizer.eos_id),
        add_generation_prompt,
        variables or {},
    )
    with renderer or Renderer(limits) as child:
        rendered = child.render(request)
    try:
        ids = tokenize_rendered(tokenizer, rendered.text, control, stand_ins)
    except UnicodeEncodeError:
        raise TemplateError("the chat template writes half a character", "use --raw or --chat-template") from None
    text = stand_ins.restore(rendered.text)
    # A template that writes a start token anywhere, be it after a space, sees to it itself; user text never spells one.
    add_start = tokenizer.add_bos and tokenizer.bos_id not in ids
    return Prompt(_finish(tokenizer, ids, add_start), text, template.origin, rendered.system_folded)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises UsageError for no messages, a role that is not one word, or content that is not Unicode text."""
    if not messages:
        raise UsageError("there are no messages", "give at least one user message")
    for message in messages:
        if not isinstance(message.role, str) or not _ROLE.fullmatch(message.role):
            raise UsageError(f"{message.role!r:.80} is not a role", "use system, user or assistant")
        if not isinstance(message.content, str):
            raise UsageError(f"the content of a message is {type(message.content).__name__}, not text")
        _utf8(message.content, f"the {message.role} message")


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
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{name} is not valid text: half a character at position {error.start}"
        raise UsageError(what, "write it as UTF-8") from None
