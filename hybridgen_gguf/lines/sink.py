"""The output of a long run, a JSON line for each line of the input: it grows, and an interruption costs no line.

Lines are appended to NAME.partial, each whole and synced; when all are there it gets its name. So NAME is either absent
or complete, and what was paid for is never lost. After a crash the last line may be cut: it is taken off, its request
runs again. Invariant: a line of the input has at most one line in the output.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from ..errors import BadFile, Busy, NoSpace, NotFound, UsageError
from ..printable import printable

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class Sink:
    """The output `path` for lines with the ids `expected`. Use as a context manager, or call `close`.

    `resume`: go on where an interrupted run has left off. Raises UsageError where a file is in the way or the input has
    changed, BadFile for one that is no output of ours, Busy while another run writes it.
    """

    def __init__(self, path: Path, expected: Iterable[str], *, resume: bool, source: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.done: dict[str, bool] = {}
        """Ids of lines that are there already; False for those that are errors."""
        self._check_names(source)
        self._lock = FileLock(str(path.with_name(f".{path.name}.lock")))
        self._file: int | None = None
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Busy(f"another run writes {printable(str(path))}", "wait for it, or give another -o") from None
        except OSError as error:
            raise self._cannot(error) from None
        try:
            self._open(set(expected), resume)
        except BaseException:
            self.close()
            raise

    def _check_names(self, source: Path) -> None:
        shown = printable(str(self.path))
        if not self.path.name or self.path.is_dir():
            raise UsageError(f"the output {shown or '-o'} is a folder", "give a file name in it")
        if not self.path.parent.is_dir():
            raise NotFound(f"the output folder {printable(str(self.path.parent))} does not exist", "make it first")
        for name in (self.path, self.partial):
            if name.exists() and source.exists() and name.samefile(source):
                raise UsageError(f"the output {shown} is the input", "give another output name")
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"the output {shown} is not a regular file", "give a file name in a folder")

    def _open(self, expected: set[str], resume: bool) -> None:
        shown, there = printable(str(self.path)), self.path if self.path.exists() else self.partial
        if there.exists() and (there == self.path or there.stat().st_size):
            if not resume:
                what = f"{shown} is there already" if there == self.path else f"{shown} was begun by an earlier run"
                hint = "--resume goes on with it" if there == self.partial else "give another -o, or remove it"
                raise UsageError(what, hint)
            end = self._read(there, expected)
            if there == self.path and len(self.done) == len(expected):
                return
            if there == self.path:
                raise UsageError(f"{shown} is complete, for an input of fewer lines", "give another -o, or remove it")
            with self._writing():
                os.truncate(there, end)
        with self._writing():
            self._file = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def _read(self, path: Path, expected: set[str]) -> int:
        """Notes what is there; where the last whole line ends."""
        shown, end = printable(str(path)), 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                whole = raw.endswith(b"\n")
                try:
                    line = json.loads(raw)
                    name, good = str(line["id"]), line["error"] is None
                except (ValueError, KeyError, TypeError, RecursionError):
                    if not whole:  # cut by a crash
                        break
                    raise BadFile(f"line {number} of {shown} is not one of ours", "give another -o") from None
                if not whole:
                    break
                if name not in expected or name in self.done:
                    what = f"line {number} of {shown} answers no line of the input: the input has changed"
                    raise UsageError(what, "give the input it was begun with, or another -o")
                self.done[name] = good
                end += len(raw)
        return end

    @property
    def complete(self) -> bool:
        """Whether the output has its name already."""
        return self._file is None

    def write(self, line: Mapping[str, Any], *, sync: bool = True) -> None:
        """Appends a line; `sync` False: more follow at once. Raises NoSpace."""
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
        assert self._file is not None  # the caller asks `complete` first
        with self._writing():
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            if sync:
                os.fsync(self._file)

    def publish(self) -> None:
        """All lines are there: the output gets its name."""
        if self._file is not None:
            with self._writing():
                os.fsync(self._file)
                self.partial.replace(self.path)
                _sync_folder(self.path.parent)
            os.close(self._file)
            self._file = None

    def _writing(self) -> _Faults:
        return _Faults(self)

    def _cannot(self, error: OSError) -> NoSpace:
        shown = printable(str(self.path))
        return NoSpace(f"{shown} cannot be written: {error.strerror}", "free some space, or write elsewhere")

    def close(self) -> None:
        """What is written stays; `resume` goes on with it."""
        if self._file is not None:
            empty = not os.fstat(self._file).st_size
            os.close(self._file)
            self._file = None
            if empty:
                self.partial.unlink(missing_ok=True)
        if self._lock.is_locked:
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Faults:
    """Around writing: an OSError becomes a NoSpace that names the output."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise self._sink._cannot(error) from None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
