"""Token ids → text that may be shown: half characters and possible stop strings are held back. Pure; knows no model,
no sampling and no terminal.

Invariant: for any split of the bytes over tokens, everything returned by `push` and `finish`, joined, is
`all_bytes.decode("utf-8", "replace")` cut before the earliest stop string in it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import UsageError

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a reply ended: an end token or a stop string; the token limit or a full context; the user."""

_CODE_POINTS = 0x110000


@dataclass(frozen=True)
class Match:
    """The earliest stop string found so far: `start` is its first character, counted from the start of the text."""

    start: int
    stop: str


class StopMatcher:
    """An Aho-Corasick automaton over characters: time is linear in the text, whatever the number of stop strings.

    `horizon` is the number of characters that no stop string can begin in any more. `match` is the earliest stop
    string seen; it is `settled` once no string that began earlier can still be completed. Of two that begin at the same
    place, the shorter counts: it is complete first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UsageError for an empty stop string and for one that is no valid text."""
        for stop in stops:
            _check_stop(stop)
        self._next: dict[int, int] = {}  # state * _CODE_POINTS + character -> state; a dict a state costs 5x the memory
        self._fail = [0]
        self._depth = [0]
        self._longest: list[str | None] = [None]  # the longest stop string that ends in this state
        self._build(list(dict.fromkeys(stops)))
        self._state = 0
        self._position = 0
        self.match: Match | None = None

    def _build(self, stops: list[str]) -> None:
        # One depth at a time, so that a state's failure link always leads to a finished, shallower state.
        ends = [0] * len(stops)
        active = list(range(len(stops)))
        depth = 0
        while active:
            for index in active:
                parent = ends[index]
                ends[index] = self._child(parent, ord(stops[index][depth]))
                if len(stops[index]) == depth + 1:
                    self._longest[ends[index]] = stops[index]
            depth += 1
            active = [index for index in active if len(stops[index]) > depth]

    def _child(self, parent: int, character: int) -> int:
        key = parent * _CODE_POINTS + character
        child = self._next.get(key)
        if child is not None:
            return child
        child = len(self._fail)
        link = self._step(self._fail[parent], character) if parent else 0
        self._next[key] = child
        self._fail.append(link)
        self._depth.append(self._depth[parent] + 1)
        self._longest.append(self._longest[link])
        return child

    def _step(self, state: int, character: int) -> int:
        following = self._next.get(state * _CODE_POINTS + character)
        while following is None and state:
            state = self._fail[state]
            following = self._next.get(state * _CODE_POINTS + character)
        return following or 0

    @property
    def horizon(self) -> int:
        """Characters, counted from the start, that certainly come before any stop string."""
        pending = self._position - self._depth[self._state]
        return pending if self.match is None else min(pending, self.match.start)

    @property
    def settled(self) -> bool:
        """Whether `match` is final: no stop string that began before it is still possible."""
        return self.match is not None and self._position - self._depth[self._state] >= self.match.start

    def feed(self, text: str) -> None:
        """Reads on; stops reading as soon as `settled`."""
        if not self._next:
            self._position += len(text)
            return
        for character in text:
            if self.settled:
                return
            self._state = self._step(self._state, ord(character))
            self._position += 1
            stop = self._longest[self._state]
            if stop is not None:
                start = self._position - len(stop)
                if self.match is None or start < self.match.start:
                    self.match = Match(start, stop)


def _check_stop(stop: str) -> None:
    if not stop:
        raise UsageError("a stop string cannot be empty", "leave it out, or give at least one character")
    try:
        stop.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("a stop string is not valid text", "write it as UTF-8") from None


class TextStream:
    """Turns tokens into text as they come.

    `token_bytes(token)` gives a token's bytes, which need not be whole characters. A byte sequence that can't become a
    character is replaced by U+FFFD exactly where and as often as `bytes.decode("utf-8", "replace")` would.

    A stop string that began earlier wins over one that was completed earlier, so a completed one may wait for a few
    more tokens until the longer one fails or matches. `stopped` is set then, and nothing is shown meanwhile.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        """Raises UsageError for an empty stop string and for one that is no valid text."""
        self._token_bytes = token_bytes
        self._matcher = StopMatcher(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._shown: list[str] = []
        self._shown_length = 0
        self._finished = False

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None. Once set, `push` and `finish` give nothing more."""
        match = self._matcher.match
        return match.stop if match is not None and (self._finished or self._matcher.settled) else None

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token: int) -> str:
        """The text that may be shown now that `token` is known; often one word, sometimes empty."""
        return self.push_bytes(self._token_bytes(token))

    def push_bytes(self, data: bytes) -> str:
        """As `push`, for bytes."""
        if self._finished or self._matcher.settled:
            return ""
        return self._accept(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest: a half character as U+FFFD, and what looked like the beginning of a stop string. Idempotent."""
        if self._finished:
            return ""
        shown = "" if self._matcher.settled else self._accept(self._decoder.decode(b"", True))
        self._finished = True
        if self._matcher.match is None:
            return shown + self._release(len(self._held))
        return shown + self._release(self._matcher.match.start - self._shown_length)

    def _accept(self, text: str) -> str:
        self._matcher.feed(text)
        self._held += text
        return self._release(self._matcher.horizon - self._shown_length)

    def _release(self, length: int) -> str:
        if length <= 0:
            return ""
        shown, self._held = self._held[:length], self._held[length:]
        self._shown.append(shown)
        self._shown_length += length
        return shown
