"""The lines of an input file: found and numbered first, parsed one by one when it is their turn.

Knows JSON, not what the lines ask. Invariant: a line's `id` depends on its number and bytes alone, so that an answer
can be matched with its line after an interruption, and a changed input is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NotFound, UsageError
from ..named_files import open_named
from ..printable import printable

_LONGEST = 64 << 20  # bytes of a line
_SHOWN = 60


@dataclass(frozen=True)
class Line:
    """`number` counts from 1; `id` names the line in the output; `first`: the number of an earlier line with the same
    custom_id. `error`: why the line cannot be used; `value` is empty then."""

    number: int
    id: str
    custom_id: str | None
    value: Mapping[str, Any]
    error: str = ""
    first: int | None = None


class Source:
    """The lines of `path`; empty ones do not count. Raises NotFound when it cannot be read, UsageError for no line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: list[tuple[int, int, int]] = []  # number, offset, length
        self.longest = 0
        """Bytes of the longest line."""
        self._first: dict[str, int] = {}  # custom_id: the line that has it first
        try:
            with open_named(path) as file:
                self._index(file)
        except OSError as error:
            raise NotFound(f"{printable(str(path))} cannot be read: {error.strerror}") from None
        if not self._places:
            raise UsageError(f"{printable(str(path))} holds no line", "give a JSON object a line")

    def _index(self, file: Any) -> None:
        at = 0
        for number, raw in enumerate(file, 1):
            if raw.strip():
                self._places.append((number, at, len(raw)))
                self.longest = max(self.longest, len(raw))
                name = custom_id_of(_parsed(raw)[0])
                if name is not None:
                    self._first.setdefault(name, number)
            at += len(raw)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Line]:
        with open_named(self.path) as file:
            for number, offset, length in self._places:
                file.seek(offset)
                yield self._line(number, file.read(length))

    def _line(self, number: int, raw: bytes) -> Line:
        name = f"batch_req_{hashlib.sha256(b'%d:' % number + raw.strip()).hexdigest()[:24]}"
        value, error = _parsed(raw)
        custom_id = custom_id_of(value)
        if not error and custom_id is None:
            error = "the line has no custom_id, which names its answer"
        first = self._first.get(custom_id or "")
        first = None if first is None or first >= number else first
        if not error and first is not None:
            error = f"custom_id '{printable(str(custom_id))[:_SHOWN]}' stands on line {first} already"
        return Line(number, name, custom_id, {} if error else value, error, first)


def custom_id_of(value: Mapping[str, Any]) -> str | None:
    """A line's custom_id, where it is a text."""
    name = value.get("custom_id")
    return name if isinstance(name, str) and name else None


def _parsed(raw: bytes) -> tuple[Mapping[str, Any], str]:
    """A line's object, or an empty one and why it is none."""
    if len(raw) > _LONGEST:
        return {}, f"the line has more than {_LONGEST >> 20} MiB"
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return {}, "the line is not UTF-8 text"
    except (ValueError, RecursionError) as error:
        return {}, f"the line is not JSON: {str(error)[:_SHOWN]}"
    return (value, "") if isinstance(value, dict) else ({}, "the line is not a JSON object")
