"""Bytes of a hostile file, read forwards through a window: no length is believed before it is checked.

Knows strings, numbers and the end of the file; does not know what they mean. Every error names the file and what was
being read. Invariant: memory stays near the window's size plus the one string asked for, whatever the file claims.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from ..errors import BadFile, NotFound
from ..printable import printable

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_WINDOW = 1 << 20


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, unbuffered. Raises NotFound, or BadFile for a directory, device or locked file."""
    shown = printable(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadFile(f"{shown} is a directory, not a GGUF file", _hint_for_folder(path))
        if not stat.S_ISREG(mode):
            raise BadFile(f"{shown} is not a regular file")
        return path.open("rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if path.is_symlink():
            raise NotFound(f"{shown} is a link to a file that does not exist") from None
        raise NotFound(f"{shown} does not exist", "check the path; `hgguf models` lists known names") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise NotFound(f"{printable(str(path), limit=60)} does not exist: the name is too long") from None
        raise BadFile(f"{shown} cannot be read: {error.strerror}") from None


def _hint_for_folder(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.name.endswith((".gguf", ".safetensors")))
    except OSError:
        return ""
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        return f"give the file in it: {printable(models[0])}"
    return "convert it first: hgguf convert FOLDER OUT.gguf" if names else "give the .gguf file itself"


class ByteReader:
    """`pos`: the next byte's place in the file; `size`: bytes of the file. `where` names what is read, for messages."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self.size, self.pos = path, file, size, 0
        self._window, self._base = b"", 0

    def peek(self, size: int) -> bytes:
        """Up to `size` of the next bytes, fewer only at the end of the file."""
        size = min(size, self.size - self.pos)
        self._need(size, "the start")
        at = self.pos - self._base
        return self._window[at : at + size]

    def skip_strings(self, count: int, where: str) -> None:
        """Passes over `count` strings without keeping them."""
        # The hot loop of a start: 262,144 pieces in about 20 ms. A length too large runs off the window and ends it.
        unpack, left = _U64.unpack_from, count
        while left:
            self._need(8, where)
            window, at, done = self._window, self.pos - self._base, 0
            try:
                for done in range(left):  # noqa: B007  # read after the loop, when it broke off
                    at += unpack(window, at)[0] + 8
                done = left
            except (struct.error, OverflowError):
                pass
            self.pos, left = self._base + at, left - done
            if self.pos > self.size:
                raise self.cut(f"a string in {where} runs past the end of the file")

    def _fill(self, size: int) -> None:
        self._file.seek(self.pos)
        parts, left = [], size
        while left and (part := self._file.read(left)):
            parts.append(part)
            left -= len(part)
        if left:
            raise self.bad("became shorter while it was read")
        self._window, self._base = b"".join(parts), self.pos

    def _need(self, size: int, where: str) -> None:
        if self.pos + size > self.size:
            raise self.cut(f"the file ends inside {where}")
        if self.pos < self._base or self.pos + size > self._base + len(self._window):
            self._fill(min(max(size, _WINDOW), self.size - self.pos))

    def take(self, size: int, where: str) -> bytes:
        """The next `size` bytes."""
        self._need(size, where)
        at = self.pos - self._base
        self.pos += size
        return self._window[at : at + size]

    def u32(self, where: str) -> int:
        number: int = _U32.unpack(self.take(4, where))[0]
        return number

    def u64(self, where: str) -> int:
        number: int = _U64.unpack(self.take(8, where))[0]
        return number

    def string(self, where: str, longest: int) -> str:
        """A string of at most `longest` bytes behind its 8-byte length; broken UTF-8 is replaced."""
        size = self.u64(where)
        if size > self.size - self.pos:
            raise self.over(where, size)
        if size > longest:
            raise self.bad(f"{where} has the absurd length of {size:,} bytes")
        return self.take(size, where).decode("utf-8", errors="replace")

    def over(self, where: str, size: int) -> BadFile:
        """The error for something that claims more bytes than are left."""
        return self.cut(f"{where} claims {size:,} bytes, {max(self.size - self.pos, 0):,} are left in the file")

    def cut(self, reason: str) -> BadFile:
        """The error for a file that ends too early."""
        return self.bad(f"is cut short or damaged: {reason}", "fetch or copy the file again")

    def bad(self, reason: str, hint: str = "") -> BadFile:
        """The error for this file; `reason` continues a sentence that starts with its name."""
        verb = reason.startswith(("is ", "has ", "says ", "became "))
        return BadFile(f"{printable(str(self._path))}{' ' if verb else ': '}{reason}", hint)
