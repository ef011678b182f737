"""What a request asks for: GenerateOptions, and how keyword arguments change them. Plain data.

Invariant: what is out of range is refused by its name before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .answer import REASONING_FORMATS
from .errors import UsageError
from .sample import SampleOptions


@dataclass(frozen=True)
class GenerateOptions:
    """One request. `max_tokens` None: until the model ends or the context is full; `seed` None: random.

    `reasoning_budget`: thoughts end after so many tokens, in the model's own way; None: when the model ends them.
    `reasoning_format`: one of answer.REASONING_FORMATS. `stop` strings end the answer, never its thoughts.
    `grammar`: the answer, not its thoughts, is a text of this grammar (GBNF, as llama.cpp's grammars/README.md has it);
    `json_schema`: it is JSON of this schema, as text or as a mapping. At most one of both.
    `priority`: higher ones are taken first where requests wait for each other; ten seconds of waiting count as one.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: int = 0
    ignore_end: bool = False
    reasoning_budget: int | None = None
    reasoning_format: str = "auto"
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    priority: int = 0
    sample: SampleOptions = field(default_factory=SampleOptions)

    @property
    def schema_text(self) -> str | None:
        """`json_schema` as text. Raises UsageError for what JSON cannot hold."""
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema
        try:
            return json.dumps(self.json_schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"json_schema holds what JSON cannot: {error}", "give a mapping as JSON has them"
            ) from None


def without_thoughts(options: GenerateOptions, reasoning: bool | None) -> GenerateOptions:
    """The options with a budget of no thoughts where `reasoning` is False: for templates without a switch."""
    return replace(options, reasoning_budget=0) if reasoning is False else options


def merged(options: GenerateOptions | None, changes: dict[str, Any]) -> GenerateOptions:
    """`options` (or the defaults) with `changes` to its own fields or to those of its SampleOptions."""
    base = options or GenerateOptions()
    own = {name: value for name, value in changes.items() if name in GenerateOptions.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in own}
    unknown = [name for name in rest if name not in SampleOptions.__dataclass_fields__]
    if unknown:
        raise UsageError(f"'{unknown[0]}' is not an option of generate", "see GenerateOptions and SampleOptions")
    if "stop" in own:
        own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
    changed = replace(base, **own)
    changed = replace(changed, sample=replace(changed.sample, **rest))
    for name in ("max_tokens", "reasoning_budget"):
        value = getattr(changed, name)
        if value is not None and value < 0:
            raise UsageError(f"{name} {value} is out of range", "leave it out for no limit")
    if changed.grammar is not None and changed.json_schema is not None:
        raise UsageError("a grammar and a JSON schema were given", "give one of them")
    if changed.reasoning_format not in REASONING_FORMATS:
        what = f"reasoning_format '{changed.reasoning_format}' is not known"
        raise UsageError(what, f"one of: {', '.join(REASONING_FORMATS)}")
    return changed
