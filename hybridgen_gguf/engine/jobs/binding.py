"""What the jobs of `make` need from the engine's libraries beyond opening models. Knows nothing of models.

Invariant: importing this module loads nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from ..library import load

_kept: list[Any] = []


@functools.cache
def llama() -> Any:
    """The binding's module `llama_cpp.llama_cpp`, its backends started."""
    api = load().api
    api.llama_backend_init()
    return api


@functools.cache
def ggml() -> ctypes.CDLL:
    """A handle of our own to the library with the `gguf_*` and `ggml_*` functions: its declarations are ours."""
    return ctypes.CDLL(load().base._name)


def on_log(handler: Callable[[str], None]) -> None:
    """Sends every piece of the engine's log to `handler`. Pieces are not whole lines."""
    module = llama()

    @module.llama_log_callback  # type: ignore[untyped-decorator]  # the binding is untyped
    def piece(_level: int, text: bytes, _data: object) -> None:
        handler(text.decode("utf-8", "replace"))

    _kept.append(piece)  # the engine keeps the pointer
    module.llama_log_set(piece, None)
