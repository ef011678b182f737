"""When the engine gives up (GGML_ASSERT, GGML_ABORT) it calls us, and aborts the process as soon as we return.

For a command line one plain error says more than a signal does, so it does not return. Other programs keep the signal.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .library import Library

act: Callable[[str], NoReturn] | None = None  # gets the engine's reason, on the thread that failed; ends the process
_kept: object = None  # the library holds only a pointer, so the object must stay alive here
_first = threading.Lock()  # several threads of one operation may fail at once; one speaks


def listen(library: Library) -> None:
    """From now on `act` is called, where there is one."""
    global _kept
    if (ending := act) is not None and _kept is None:
        from .abi.ggml import AbortCallback

        def once(message: bytes) -> None:
            _first.acquire()  # never given back: the process ends
            ending(reason(message.decode("utf-8", "replace")))

        _kept = AbortCallback(once)
        library.base.ggml_set_abort_callback(_kept)


def reason(text: str) -> str:
    """The failed assertion in what the engine printed, without the folders of its source; empty when there is none."""
    for line in text.splitlines():
        if "GGML_A" in line or re.search(r"\.\w+:\d+: ", line):
            return _shortened(line)
        if "terminate called" in line or "what():" in line:
            return line.strip()[:200]
    return ""


def _shortened(line: str) -> str:
    match = re.search(r"[^/\\]+:\d+: .*", line)
    return (match[0] if match else line).strip()[:200]
