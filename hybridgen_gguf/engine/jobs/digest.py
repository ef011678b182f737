"""SHA-256 of files, also of those that the engine is still writing.

The engine writes a header last, but the same writer can make it beforehand, so that the rest is hashed as it appears.
Invariant: a digest is of what lies in the file at the end; a header that is not the one expected costs another reading.
Source: GGUF string values as in ggml/src/gguf.cpp of the pinned engine.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import BadFile, EngineError

_BLOCK = 1 << 20
_SYNC_EVERY = 64 << 20  # bytes after which the disk is asked to keep up, so that little is left to sync at the end
_STRING = 8  # GGUF_TYPE_STRING


def sha256_of(*paths: Path) -> str:
    """Hex digest of the files' bytes, one after the other (the shards of one model count as one file)."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            _add(file, digest)
    return digest.hexdigest()


def place_of(header: bytes, key: str, value: str) -> int:
    """Where the text `value` of `key` starts in a header. Raises EngineError when it is not there."""
    name = key.encode()
    before = len(name).to_bytes(8, "little") + name + _STRING.to_bytes(4, "little") + len(value).to_bytes(8, "little")
    at = header.rfind(before + value.encode())
    if at < 0:
        raise EngineError(f"the engine did not write {key}", "please report this")
    return at + len(before)


class Digests:
    """Hashes `sources` (as one), puts the digest where the first header says `unknown` under `key`, and hashes the
    `written` files with these headers. `finish` returns both when the engine has closed the files."""

    def __init__(
        self, sources: Sequence[str], written: Sequence[str], headers: Sequence[bytes], key: str, unknown: str
    ):
        self._sources, self._written = [Path(path) for path in sources], [Path(path) for path in written]
        self._headers = headers
        self._key, self._unknown = key, unknown
        self._closed = threading.Event()
        self._source, self._found = "", list[str]()
        self._fault: OSError | EngineError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, Any]:
        """`{source_sha256, sha256: [of each file written]}`; the first file then holds the former."""
        self._closed.set()
        self._thread.join()
        if isinstance(self._fault, OSError):
            raise BadFile(f"the source or the result cannot be read: {self._fault.strerror}")
        if self._fault is not None:
            raise self._fault
        same = all(_starts_with(path, header) for path, header in zip(self._written, self._headers, strict=True))
        with self._written[0].open("r+b") as file:
            file.seek(place_of(file.read(len(self._headers[0])), self._key, self._unknown))
            file.write(self._source.encode())
        found = self._found if same else [sha256_of(path) for path in self._written]
        return {"source_sha256": self._source, "sha256": found}

    def _run(self) -> None:
        try:
            self._source = sha256_of(*self._sources)
            for index, header in enumerate(self._headers):
                self._found.append(self._while_written(index, self._filled(header) if index == 0 else header))
        except (OSError, EngineError) as fault:
            self._fault = fault

    def _filled(self, header: bytes) -> bytes:
        at = place_of(header, self._key, self._unknown)
        return header[:at] + self._source.encode() + header[at + len(self._unknown) :]

    def _while_written(self, index: int, header: bytes) -> str:
        digest, path = hashlib.sha256(header), self._written[index]
        while not path.exists() and not self._closed.wait(0.02):
            pass
        with path.open("rb", buffering=0) as file:
            file.seek(len(header))
            unsynced = 0
            while True:
                complete = self._complete(index)  # ask first, then read: bytes written in between are still hashed
                unsynced += _add(file, digest)
                if unsynced > _SYNC_EVERY:
                    os.fdatasync(file.fileno())
                    unsynced = 0
                if complete:
                    return digest.hexdigest()
                self._closed.wait(0.02)

    def _complete(self, index: int) -> bool:
        """Whether the engine is done with a file: it writes the next one, or has closed all."""
        return self._closed.is_set() or any(path.exists() for path in self._written[index + 1 :])


def _starts_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _add(file: BinaryIO | Any, digest: Any) -> int:
    """Adds what is left of `file`; returns its bytes."""
    size = 0
    while block := file.read(_BLOCK):
        digest.update(block)
        size += len(block)
    return size
