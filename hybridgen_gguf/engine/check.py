"""Opens a finished file the way a user will, and shows how it splits a text. For child processes.

Knows nothing of the folder the file came from. Invariant: the file is opened in full once, weights and context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .handles import Context, Model
from .settings import ContextSettings, ModelSettings


def check_job(options: Mapping[str, Any], _send: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """`{tokens}`: the ids of each of `options["texts"]`, without start and end tokens. Raises EngineError."""
    with Model(Path(options["model"]), ModelSettings()) as model:
        tokens = [model.tokenize(text.encode(), add_special=False, parse_special=False) for text in options["texts"]]
        if model.has_decoder and options["with_context"]:
            with Context(model, ContextSettings(n_ctx=256, n_batch=32, n_ubatch=32)):
                pass
        return {"tokens": tokens}
