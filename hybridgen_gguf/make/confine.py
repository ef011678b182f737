"""Keeps a child process from the network, from other programs, and from code and pickles that lie in a model's folder.

Works through Python's audit events, which cannot be switched off again and which C code raises too. Knows nothing of
models. Invariant: after `confine`, the forbidden acts raise ForbiddenError (a PermissionError) wherever they are tried.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

_NETWORK = frozenset({"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind"})
_PROGRAMS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"}
)


class ForbiddenError(PermissionError):
    """Something in the model's folder tried what a conversion does not need."""


def confine(folders: tuple[Path, ...], allow_code: bool, allow_pickle: bool) -> None:
    """From now on: no network, no programs; no Python code from `folders` and no pickled objects unless allowed."""
    roots = tuple(str(folder.resolve()) for folder in folders)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NETWORK:
            raise ForbiddenError("the network is closed during a conversion")
        if event in _PROGRAMS:
            raise ForbiddenError(f"no program may be started during a conversion ({event})")
        if event == "pickle.find_class" and not allow_pickle:
            raise ForbiddenError(f"a pickle asked for {arguments[0]}.{arguments[1]}")
        if event == "exec" and not allow_code and _from(arguments[0], roots):
            raise ForbiddenError(f"code in the model's folder was about to run: {arguments[0].co_filename}")

    sys.addaudithook(hook)


def _from(code: object, roots: tuple[str, ...]) -> bool:
    return isinstance(code, CodeType) and str(Path(code.co_filename).resolve()).startswith(roots)
