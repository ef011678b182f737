"""One hunk of a patch against the lines of a file: where it fits, and what it makes of them.

A hunk fits where its old lines stand: at its own line, else at the nearest place; else the same with one and with two
lines of context ignored at both ends (fuzz), as GNU patch does. Lines that the patch removes are never ignored.
Pure: knows no files and no git. Invariant: lines that no hunk names are not touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_FUZZ = 2


@dataclass(frozen=True)
class Hunk:
    """`start`: line of the first old line, from 1 (0: the old side is empty); `lines`: (' ', '-' or '+', text)."""

    start: int
    section: str
    lines: tuple[tuple[str, str], ...]

    def side(self, other: str, fuzz: int) -> list[str]:
        """The lines without those marked `other`, less `fuzz` context lines at each end."""
        leading, trailing = self.cut(fuzz)
        kept = self.lines[leading : len(self.lines) - trailing]
        return [text for mark, text in kept if mark != other]

    def cut(self, fuzz: int) -> tuple[int, int]:
        """How many context lines can be ignored at the start and at the end."""
        marks = "".join(mark for mark, _ in self.lines)
        leading, trailing = len(marks) - len(marks.lstrip(" ")), len(marks) - len(marks.rstrip(" "))
        return min(fuzz, leading), min(fuzz, trailing)

    @property
    def old_count(self) -> int:
        return sum(mark != "+" for mark, _ in self.lines)

    @property
    def added(self) -> set[str]:
        """Lines with a word in them that this hunk brings."""
        return {text.strip() for mark, text in self.lines if mark == "+" and re.search(r"\w", text)}

    @property
    def expected(self) -> set[str]:
        return {text.strip() for mark, text in self.lines if mark != "+"}


@dataclass(frozen=True)
class Fit:
    """`at`: index of the first old line that is looked at; `places`: how many there were to choose from."""

    at: int
    fuzz: int
    offset: int
    places: int


def parse(text: str) -> Hunk:
    """A hunk as git writes it, from `@@` on. Raises ValueError on anything else."""
    first, *rest = text.split("\n")
    head = re.match(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@ ?(.*)", first)
    if head is None:
        raise ValueError(f"not the start of a hunk: {first[:60]}")
    lines: list[tuple[str, str]] = []
    for line in rest:
        if line.startswith("\\") and lines:  # no line end at the end of the file
            lines[-1] = (lines[-1][0], lines[-1][1].removesuffix("\n"))
        elif line[:1] in (" ", "-", "+") and line:
            lines.append((line[0], line[1:] + "\n"))
    return Hunk(int(head[1]), head[2].strip(), tuple(lines))


def fit(hunk: Hunk, lines: list[str], drift: int = 0) -> Fit | None:
    """Where `hunk` fits; None: nowhere. `drift`: lines that the hunks above it have moved it by."""
    for fuzz in range(MOST_FUZZ + 1):
        if fuzz and hunk.cut(fuzz) == hunk.cut(fuzz - 1):
            break
        old = hunk.side("+", fuzz)
        wanted = max(hunk.start - 1, 0) + drift + hunk.cut(fuzz)[0]
        if not old:  # nothing to hold on to: only an empty file will do
            return Fit(0, fuzz, 0, 1) if not lines else None
        found = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        if found:
            at = min(found, key=lambda place: abs(place - wanted))
            return Fit(at, fuzz, at - wanted, len(found))
    return None


def applied(hunk: Hunk, lines: list[str], where: Fit) -> list[str]:
    """The lines after `hunk` at `where`."""
    old, new = hunk.side("+", where.fuzz), hunk.side("-", where.fuzz)
    return [*lines[: where.at], *new, *lines[where.at + len(old) :]]
