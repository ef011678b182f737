"""Opens a finished file the way a user will, and shows how it splits a text. For child processes.

Knows nothing of the folder the file came from. Invariant: the file is opened in full once, weights and context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ...settings import ContextSettings, ModelSettings
from .. import log
from ..handles import Context, Model


def check_job(options: Mapping[str, Any], _send: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """`{tokens, not_ends}`: the ids of each of `options["texts"]`, without start and end tokens; those of the ids
    `options["ends"]`, if given, at which the engine would not end an answer. Raises EngineError."""
    with _open(options["model"]) as model:
        tokens = [model.tokenize(text.encode(), add_special=False, parse_special=False) for text in options["texts"]]
        if model.has_decoder and options["with_context"]:
            with Context(model, ContextSettings(n_ctx=256, n_batch=32, n_ubatch=32)):
                pass
        ends = [token for token in options.get("ends", ()) if not (token < model.n_vocab and model.is_end(token))]
        return {"tokens": tokens, "not_ends": ends}


def _open(path: str) -> Model:
    try:
        return Model(Path(path), ModelSettings())
    except EngineError as error:
        # The last error only says that loading failed; the reason is in the line before.
        reasons = [line.strip() for _, line in log.lines if "error loading model" in line]
        raise EngineError(
            reasons[-1].rpartition("error loading model")[2].lstrip(": ") if reasons else error.what
        ) from None
