"""The folder that fetched models live in: one folder a model, a lock, a record of what was verified.

Knows nothing of where models come from. Invariant: a file under its final name is complete and has the digest that its
record says; unfinished work lies in `.partial` beside it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import NoSpace
from ..folders import cache_folder
from ..printable import printable
from ..units import format_size

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0: not known)
_BLOCK = 1 << 20
_SPARE = 64 << 20  # bytes that are left free, so that a download does not choke the machine
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCKED = {errno.EACCES, errno.EPERM, errno.EROFS}
DISK_ERRORS = _FULL | _LOCKED


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a finished file. `origin`: where it came from, in the words of whoever fetched it."""

    path: Path
    sha256: str
    bytes: int
    origin: str


def models_folder() -> Path:
    """HGGUF_MODELS, else `models` in the user's cache folder. Not created."""
    return Path(os.environ.get("HGGUF_MODELS") or cache_folder() / "models")


@dataclass(frozen=True)
class Place:
    """The folder of one model."""

    folder: Path

    @classmethod
    def of(cls, name: str, root: Path | None = None) -> Place:
        """The place of the model called `name` (an alias or user/repo:QUANT); no two names share one."""
        # Aliases hold no '@', so `a/b` never lands where an alias `a-b` does.
        safe = "".join(char if char.isalnum() or char in "._-" else "@" for char in name)
        return cls((root or models_folder()) / (safe if safe.strip(".") else "@"))

    @property
    def partial(self) -> Path:
        """Where unfinished downloads lie; may be removed at any time by the lock's owner."""
        return self.folder / ".partial"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out; waits for them. Raises NoSpace when the folder cannot be made."""
        from filelock import FileLock

        with disk_errors(self.folder):
            locks = self.folder.parent / ".locks"
            locks.mkdir(parents=True, exist_ok=True)
            lock = FileLock(locks / f"{self.folder.name}.lock")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def finished(self) -> Record | None:
        """The model that was fetched here, if its file is still the one that was verified."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads((self.folder / "record.json").read_text(encoding="utf-8"))
            path = self.folder / str(noted["file"])
            status = path.stat()
            unchanged = (status.st_size, status.st_mtime_ns) == (noted["bytes"], noted["mtime_ns"])
            if unchanged and path.parent == self.folder:
                return Record(path, str(noted["sha256"]), status.st_size, str(noted["origin"]))
        return None

    def finish(self, name: str, files: list[Path], sha256: str, origin: str) -> Record:
        """Moves verified `files` from `.partial` to their final names; `name` is the one to open."""
        with disk_errors(self.folder):
            for file in files:
                file.replace(self.folder / file.name)
            path = self.folder / name
            status = path.stat()
            noted = {"file": name, "sha256": sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
            noted["origin"] = origin
            draft = self.folder / ".record.json"
            draft.write_text(json.dumps(noted), encoding="utf-8")
            draft.replace(self.folder / "record.json")
        self.clear()
        return Record(path, sha256, status.st_size, origin)

    def clear(self) -> None:
        """Removes unfinished work, and the folder when nothing else is in it."""
        shutil.rmtree(self.partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def check_room(folder: Path, needed: int) -> None:
    """Raises NoSpace when the disk of `folder` (may not exist yet) lacks room for `needed` bytes and some spare."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed + _SPARE:
        raise NoSpace(
            f"not enough room in {printable(str(folder))}: {format_size(needed)} needed, {format_size(free)} free",
            "free some space, or set HGGUF_MODELS to a folder on another disk",
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full or read-only disk into NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(
                f"the disk of {printable(str(folder))} is full", "free some space, or set HGGUF_MODELS to another disk"
            ) from None
        if error.errno in _LOCKED or isinstance(error, NotADirectoryError | FileExistsError | FileNotFoundError):
            raise NoSpace(
                f"{printable(str(folder))} cannot be written: {error.strerror}", "set HGGUF_MODELS to another folder"
            ) from None
        raise


class HashingFile:
    """Writes blocks to an open file and keeps their digest and number."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, block: bytes) -> None:
        self._file.write(block)
        self._digest.update(block)
        self.bytes += len(block)

    def sha256(self) -> str:
        """Hex digest of everything written; the data is on the disk after this."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()


def blocks(source: BinaryIO) -> Iterator[bytes]:
    """What is left of `source`, in blocks of 1 MiB."""
    while block := source.read(_BLOCK):
        yield block


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
