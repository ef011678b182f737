"""What the flags about thinking mean for a request. Knows no terminal and no model.

Invariant: everything that is wrong is a UsageError that names the flag, before any model is opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .options import ThinkFlags

_ON, _OFF = ("on", "1", "true", "enabled"), ("off", "0", "false", "disabled")  # what llama.cpp takes


@dataclass(frozen=True)
class Thinking:
    """`wanted`: True, False or None (as the template says); `budget`: tokens or None; `kwargs`: for the template."""

    wanted: bool | None
    budget: int | None
    form: str
    kwargs: dict[str, Any]


def thinking_of(flags: ThinkFlags) -> Thinking:
    """The flags, checked."""
    from ..answer import REASONING_FORMATS

    said = flags.reasoning.lower()
    if said not in (*_ON, *_OFF, "auto", "-1"):
        raise UsageError(f"--reasoning {flags.reasoning} is not known", "one of: on, off, auto")
    if flags.reasoning_budget < -1:
        raise UsageError(f"--reasoning-budget {flags.reasoning_budget} is out of range", "a number of tokens, or -1")
    if flags.reasoning_format not in REASONING_FORMATS:
        what = f"--reasoning-format {flags.reasoning_format} is not known"
        raise UsageError(what, f"one of: {', '.join(REASONING_FORMATS)}")
    kwargs = _kwargs(flags.chat_template_kwargs)
    if flags.reasoning_effort not in (None, "default"):
        kwargs = {"reasoning_effort": flags.reasoning_effort} | kwargs
    budget = None if flags.reasoning_budget < 0 else flags.reasoning_budget
    wanted = True if said in _ON else False if said in _OFF else None
    return Thinking(wanted, budget, flags.reasoning_format, kwargs)


def _kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        what = "--chat-template-kwargs is not a JSON object"
        raise UsageError(what, """for example --chat-template-kwargs '{"enable_thinking": false}'""")
    reserved = [name for name in ("messages", "tools") if name in found]
    if reserved:
        raise UsageError(f"--chat-template-kwargs cannot set '{reserved[0]}'", "use --prompt and --system-prompt")
    return found
