"""Opening files that a user names: a pipe into which nobody writes would be waited for for ever.

Invariant: opening never blocks for longer than `_PATIENCE`; what is wrong is an OSError, with the words in `strerror`.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

_PATIENCE = 3.0  # seconds for a first byte; a program that writes into a pipe may just have been started


def open_named(path: Path, *, pipes: bool = False) -> BinaryIO:
    """The file at `path`, to be read. `pipes`: also a named pipe, such as a shell makes of `<(command)`."""
    if not stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")
    if not pipes:
        raise OSError(errno.EINVAL, "it is a pipe, not a file", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    waiting = select.poll()
    waiting.register(handle, select.POLLIN | select.POLLHUP)
    if not waiting.poll(1000 * _PATIENCE):
        os.close(handle)
        raise OSError(errno.EAGAIN, "nothing writes into this pipe", str(path))
    os.set_blocking(handle, True)
    return os.fdopen(handle, "rb")
