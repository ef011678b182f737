"""Flags that change a model → adapters, metadata and Rope, checked as far as text can be.

Invariant: what is wrong is a UsageError that names the flag.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..settings import Adapter, Override, Rope
from .options.change import ChangeFlags

_NUMBERS = {"int": int, "float": float}
_TRUTH = {"true": True, "false": False}


def adapters_of(flags: ChangeFlags) -> tuple[Adapter, ...]:
    """--lora and --lora-scaled, in this order."""
    plain = [_adapter("--lora", text, scale_needed=False) for text in _split("--lora", flags.lora)]
    return (
        *plain,
        *(_adapter("--lora-scaled", text, scale_needed=True) for text in _split("--lora-scaled", flags.lora_scaled)),
    )


def _adapter(flag: str, text: str, *, scale_needed: bool) -> Adapter:
    name, colon, number = text.rpartition(":")
    if not scale_needed and (not colon or Path(text).exists()):
        return Adapter(text)
    try:
        return Adapter(name, float(number))
    except ValueError:
        if not scale_needed:
            return Adapter(text)
        raise UsageError(f"{flag} {text} is not FILE:SCALE", f"for example {flag} style.gguf:0.5") from None


def overrides_of(texts: Sequence[str] | None) -> tuple[Override, ...]:
    """--override-kv."""
    return tuple(_override(text) for text in _split("--override-kv", texts))


def _override(text: str) -> Override:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    example = "for example --override-kv llama.expert_used_count=int:1"
    if not key or not equals or not colon or kind not in (*_NUMBERS, "bool", "str"):
        raise UsageError(f"--override-kv {text} is not KEY=TYPE:VALUE, with a TYPE of int, float, bool, str", example)
    try:
        if kind == "str":
            return Override(key, value)
        return Override(key, _TRUTH[value] if kind == "bool" else _NUMBERS[kind](value))
    except (KeyError, ValueError):
        raise UsageError(f"--override-kv {text}: '{value}' is no {kind}", example) from None


_MOST_STRETCH = 1e6
"""Of a context; beyond it `1 / scale` is 0 to the engine, and every cell has the same position."""


def rope_of(flags: ChangeFlags) -> Rope:
    """--rope-* and --yarn-*."""
    scale = flags.rope_freq_scale
    if flags.rope_scale is not None:
        if scale is not None:
            raise UsageError(
                "--rope-scale and --rope-freq-scale were both given", "give one: the second is 1 / the first"
            )
        if not 0 < flags.rope_scale <= _MOST_STRETCH:
            raise UsageError(f"--rope-scale {flags.rope_scale:g} is out of range", "give more than 0, up to a million")
        scale = 1 / flags.rope_scale
    return Rope(
        scaling=flags.rope_scaling,
        freq_base=flags.rope_freq_base,
        freq_scale=scale,
        orig_ctx=flags.yarn_orig_ctx,
        ext_factor=flags.yarn_ext_factor,
        attn_factor=flags.yarn_attn_factor,
        beta_slow=flags.yarn_beta_slow,
        beta_fast=flags.yarn_beta_fast,
    )


def _split(flag: str, texts: Sequence[str] | None) -> list[str]:
    """Lists by commas, quoted where one holds a comma, as llama.cpp reads them; the name of a file stays whole."""
    parts: list[str] = []
    for text in texts or ():
        whole = flag != "--override-kv" and Path(text.rpartition(":")[0] or text).is_file()
        try:
            parts += [text] if whole else next(csv.reader([text]), [""])
        except csv.Error:
            raise UsageError(f"{flag} {text!a} is not a list", "separate its parts by commas") from None
    if "" in parts:
        raise UsageError(f"{flag} holds an empty part", "leave it out")
    return parts
