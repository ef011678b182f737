"""Chat templates: which one to use. Knows no messages, no tokens and no model; rendering is `renderer.py`'s.

Invariant: no template is parsed here; what is given out is text and where it is from.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadFile, NotFound, UsageError
from .renderer import Rendered, Renderer, RenderLimits, RenderRequest, render_chat

__all__ = [
    "BUILT_IN",
    "ChatTemplate",
    "RenderLimits",
    "RenderRequest",
    "Rendered",
    "Renderer",
    "built_in",
    "choose_template",
    "render_chat",
]

_FOLDER = Path(__file__).parent / "templates"
BUILT_IN = (
    "chatml", "gemma", "llama2", "llama3", "llama4", "mistral", "phi3", "phi4", "plain", "vicuna", "zephyr",
)  # fmt: skip
# A model with these and without a template was fine-tuned for chat; other families have theirs in base models too.
_CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja `source` and where it is from: `the model`, `built-in chatml`, `the command line`, or a file's path."""

    source: str
    origin: str


def built_in(name: str) -> ChatTemplate:
    """A template that comes with the program; `name` is one of BUILT_IN."""
    source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return ChatTemplate(source, f"built-in {name}")


def choose_template(option: str | None, of_model: str | None, vocabulary: Container[str]) -> ChatTemplate:
    """The template to use: the user's `option` (a built-in name, Jinja text, or a file), else the model's own, else
    `chatml` if its control tokens are in `vocabulary`, else `plain` (one user message: its text alone, as for a base
    model; several: `role: content` lines).

    Raises UsageError for an unknown name, NotFound and BadFile for a file.
    """
    if option is not None:
        return _from_option(option)
    if of_model is not None and of_model.strip():
        return ChatTemplate(of_model, "the model")
    return built_in("chatml" if all(token in vocabulary for token in _CHATML) else "plain")


def _from_option(option: str) -> ChatTemplate:
    if option in BUILT_IN:
        return built_in(option)
    if "{{" in option or "{%" in option:
        text = option.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # whatever the locale made of it
        return ChatTemplate(text, "the command line")
    path = Path(option)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return ChatTemplate(_read(path), str(path))
    if path.suffix or os.sep in option:
        raise NotFound(f"there is no template file '{option}'", "give a file, or one of " + ", ".join(BUILT_IN))
    near = difflib.get_close_matches(option, BUILT_IN, 1)
    what = f"'{option}' is neither a built-in chat template nor a file"
    raise UsageError(what, f"did you mean {near[0]}?" if near else "built in are " + ", ".join(BUILT_IN))


def _read(path: Path) -> str:
    limit = RenderLimits().template_bytes
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise BadFile(f"the chat template {path} is larger than {limit >> 20} MiB", "is it the right file?")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(f"the chat template {path} is not UTF-8 text", "is it the right file?") from None
    except OSError as error:
        raise NotFound(f"the chat template {path} cannot be read: {error.strerror}") from None
