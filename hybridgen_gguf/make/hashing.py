"""SHA-256 of files, at once or beside other work. Knows no models.

Invariant: a digest is of the bytes in the order given, however they are spread over files.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from ..errors import BadFile

_BLOCK = 1 << 20


def sha256_of(*paths: Path) -> str:
    """Hex digest of the files' bytes, one after the other (the shards of one model count as one file)."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


class HashInBackground:
    """The source's hash, computed while the forecast child starts."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._found: list[str] = []
        self._fault: list[OSError] = []
        self._thread = threading.Thread(target=self._hash, args=(paths,), daemon=True)
        self._thread.start()

    def _hash(self, paths: tuple[Path, ...]) -> None:
        try:
            self._found.append(sha256_of(*paths))
        except OSError as error:
            self._fault.append(error)

    def result(self) -> str:
        self._thread.join()
        if self._fault:
            raise BadFile(f"the source cannot be read: {self._fault[0].strerror}")
        return self._found[0]
