"""Keeps what the engine logs instead of letting it write to stderr, so that an error can say why.

Invariant: at most `KEPT` lines are held; the engine's own stderr output is off once `capture` has run.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

KEPT = 200
_NO_MEMORY = re.compile(r"allocat|reserve|KV tiers: .*(gave no|available)")
_LEVEL_WARN, _LEVEL_ERROR, _LEVEL_CONTINUED = 3, 4, 5

lines: deque[tuple[int, str]] = deque(maxlen=KEPT)
overrides: deque[str] = deque(maxlen=KEPT)  # what the loader says about --override-kv; cleared by who asks
_callback: Any = None  # the library holds only a pointer, so the object must stay alive here
_echo = False
_listener: Callable[[str], None] | None = None


def _keep(level: int, text: bytes, _data: object) -> None:
    line = text.decode("utf-8", "replace")
    if _echo:
        sys.stderr.write(line)
    if _listener is not None:
        _listener(line)
    if "metadata override" in line:
        overrides.append(line)
    if level == _LEVEL_CONTINUED and lines:
        level, start = lines.pop()
        line = start + line
    lines.append((level, line))


def capture(api: Any, *, echo: bool = False) -> None:
    """Routes the engine's log into `lines`; with `echo` also to stderr (`--debug`)."""
    global _callback, _echo
    _echo = echo
    if _callback is None:
        _callback = api.llama_log_callback(_keep)
        api.llama_log_set(_callback, None)


def listen(handler: Callable[[str], None] | None) -> None:
    """From now on every piece of the log also goes to `handler`. Pieces are not whole lines."""
    global _listener
    _listener = handler


def last_error() -> str:
    """The newest error line, else warning, without the C function's name; empty when there is none."""
    for wanted in (_LEVEL_ERROR, _LEVEL_WARN):
        for level, line in reversed(lines):
            text = _words(line)
            if level == wanted and text and text != "failed to load model":  # the cause stands before that line
                return text
    return ""


def failed_allocation() -> str:
    """The newest error line about memory that could not be had; empty when there is none."""
    told = (_words(line) for level, line in reversed(lines) if level == _LEVEL_ERROR)
    return next((text for text in told if _NO_MEMORY.search(text)), "")


def _words(line: str) -> str:
    head, colon, rest = line.strip().partition(": ")
    text = rest if colon and " " not in head and rest else line.strip()
    return text.removeprefix("error loading model: ")
