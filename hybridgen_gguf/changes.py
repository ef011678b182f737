"""What a user changes of a model (adapters, metadata): whether it can be, before the engine is asked, and was it used.

Knows headers and limits; no engine. Invariant: an override of another type than the file's never reaches the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .errors import BadFile, UsageError
from .model_file.adapter import check_adapter
from .model_file.shape import shape_of
from .model_file.split import ModelFile
from .plan import Limits, Plan
from .settings import LONGEST_OVERRIDE, Override


def changed_file(file: ModelFile, limits: Limits) -> ModelFile:
    """The model's header with the values that `limits` override. Raises UsageError, and BadFile for an adapter."""
    for override in limits.override_kv:
        known = file.metadata.get(override.key)
        if known is not None and type(known) is not type(override.value):
            kind = type(known).__name__ if isinstance(known, bool | int | float | str) else "a list"
            raise UsageError(f"--override-kv {override}: {override.key} is {kind} in the file", "give that type")
        if len(override.key.encode()) > LONGEST_OVERRIDE or len(str(override.value).encode()) > LONGEST_OVERRIDE:
            raise UsageError(f"--override-kv {override.key} is too long", f"at most {LONGEST_OVERRIDE} bytes")
    for adapter in limits.adapters:
        check_adapter(adapter.path, file)
    return _overridden(file, limits.override_kv) if limits.override_kv else file


def _overridden(file: ModelFile, overrides: Sequence[Override]) -> ModelFile:
    changed = file.with_metadata({override.key: override.value for override in overrides})
    try:
        shape_of(changed)
    except BadFile as error:
        shape_of(file)  # a file that is bad by itself is named as that
        raise UsageError(f"with --override-kv, {error.what}", "give a value that the model can have") from None
    return changed


def with_unused(plan: Plan, limits: Limits, used: Sequence[str]) -> Plan:
    """The plan with a warning for each override that the engine did not look at; an error where limits are strict."""
    unused = [f"--override-kv {o} has no effect: the engine reads no such key" for o in limits.override_kv]
    unused = [text for text, o in zip(unused, limits.override_kv, strict=True) if o.key not in used]
    if unused and limits.strict:
        raise UsageError(unused[0], "leave it out, or leave out --strict")
    return replace(plan, warnings=(*plan.warnings, *unused)) if unused else plan
