"""Flags that change a model while it is opened: adapters, values of its file, rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .spread import flag, plain

CHANGE = "Changes to the model"


@dataclass(frozen=True)
class ChangeFlags:
    """What is other than in the file; under llama.cpp's names."""

    lora: Annotated[
        list[str] | None,
        plain(CHANGE, "Adapter (LoRA) to apply; several by commas, or again.", "--lora", metavar="FILE[:SCALE],..."),
    ] = None
    lora_scaled: Annotated[
        list[str] | None, plain(CHANGE, "The same, with a scale.", "--lora-scaled", metavar="FILE:SCALE,...")
    ] = None
    override_kv: Annotated[
        list[str] | None,
        plain(
            CHANGE,
            "Value of the file's metadata to use instead: int, float, bool or str.",
            "--override-kv",
            metavar="KEY=TYPE:VALUE,...",
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        flag(
            CHANGE,
            "How rotary positions are scaled. [default: as the model says]",
            "--rope-scaling",
            llama="ROPE_SCALING_TYPE",
            metavar="none|linear|yarn",
        ),
    ] = None
    rope_scale: Annotated[
        float | None,
        flag(CHANGE, "Positions are divided by N: a context N times as long.", "--rope-scale", llama="ROPE_SCALE"),
    ] = None
    rope_freq_base: Annotated[
        float | None, flag(CHANGE, "Base frequency of RoPE.", "--rope-freq-base", llama="ROPE_FREQ_BASE")
    ] = None
    rope_freq_scale: Annotated[
        float | None,
        flag(CHANGE, "1/N of --rope-scale.", "--rope-freq-scale", llama="ROPE_FREQ_SCALE"),
    ] = None
    yarn_orig_ctx: Annotated[
        int | None,
        flag(CHANGE, "YaRN: context that the model was trained for.", "--yarn-orig-ctx", llama="YARN_ORIG_CTX"),
    ] = None
    yarn_ext_factor: Annotated[
        float | None,
        flag(
            CHANGE, "YaRN: share of extrapolation; 0: interpolate alone.", "--yarn-ext-factor", llama="YARN_EXT_FACTOR"
        ),
    ] = None
    yarn_attn_factor: Annotated[
        float | None,
        flag(CHANGE, "YaRN: factor on the attention's size.", "--yarn-attn-factor", llama="YARN_ATTN_FACTOR"),
    ] = None
    yarn_beta_slow: Annotated[
        float | None, flag(CHANGE, "YaRN: high correction dimension.", "--yarn-beta-slow", llama="YARN_BETA_SLOW")
    ] = None
    yarn_beta_fast: Annotated[
        float | None, flag(CHANGE, "YaRN: low correction dimension.", "--yarn-beta-fast", llama="YARN_BETA_FAST")
    ] = None
