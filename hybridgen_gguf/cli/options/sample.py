"""Flags of sampling, under llama.cpp's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .spread import flag, plain

SAMPLE = "Sampling"


@dataclass(frozen=True)
class SampleFlags:
    """How a token is chosen. Unset flags take the alias's suggestion, then the default of SampleOptions."""

    temp: Annotated[
        float | None,
        flag(
            SAMPLE,
            "Temperature; 0 or less always takes the best token. [default: 0.8]",
            "--temp",
            "--temperature",
            llama="TEMPERATURE",
        ),
    ] = None
    top_k: Annotated[
        int | None, flag(SAMPLE, "Only the K best tokens; 0 or less: all. [default: 40]", "--top-k", llama="TOP_K")
    ] = None
    top_p: Annotated[
        float | None,
        flag(
            SAMPLE,
            "The best tokens that together have this probability; 1: off. [default: 0.95]",
            "--top-p",
            llama="TOP_P",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        flag(SAMPLE, "Tokens at least this likely beside the best; 0: off. [default: 0.05]", "--min-p", llama="MIN_P"),
    ] = None
    typical: Annotated[float | None, flag(SAMPLE, "Locally typical sampling; 1: off.", "--typical", "--typical-p")] = (
        None
    )
    top_nsigma: Annotated[
        float | None,
        flag(SAMPLE, "Tokens within N standard deviations of the best; -1: off.", "--top-nsigma", "--top-n-sigma"),
    ] = None
    xtc_probability: Annotated[
        float | None, flag(SAMPLE, "Chance of leaving out the likeliest tokens; 0: off.", "--xtc-probability")
    ] = None
    xtc_threshold: Annotated[float | None, flag(SAMPLE, "Tokens above this count as likely.", "--xtc-threshold")] = None
    repeat_penalty: Annotated[
        float | None,
        flag(SAMPLE, "Divides the logits of repeated tokens; 1: off.", "--repeat-penalty", llama="REPEAT_PENALTY"),
    ] = None
    repeat_last_n: Annotated[
        int | None, flag(SAMPLE, "Tokens that penalties look back on; -1: all.", "--repeat-last-n")
    ] = None
    presence_penalty: Annotated[
        float | None,
        flag(SAMPLE, "Subtracted once from repeated tokens; 0: off.", "--presence-penalty", llama="PRESENCE_PENALTY"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        flag(SAMPLE, "Subtracted for each repetition; 0: off.", "--frequency-penalty", llama="FREQUENCY_PENALTY"),
    ] = None
    dry_multiplier: Annotated[
        float | None, flag(SAMPLE, "Strength of the DRY penalty on repeated sequences; 0: off.", "--dry-multiplier")
    ] = None
    dry_base: Annotated[float | None, flag(SAMPLE, "Growth of the DRY penalty.", "--dry-base")] = None
    dry_allowed_length: Annotated[
        int | None, flag(SAMPLE, "Repeats up to this length are free.", "--dry-allowed-length")
    ] = None
    dry_penalty_last_n: Annotated[
        int | None, flag(SAMPLE, "Tokens that DRY looks back on; -1: all.", "--dry-penalty-last-n")
    ] = None
    dynatemp_range: Annotated[
        float | None, flag(SAMPLE, "Range around the temperature; 0: off.", "--dynatemp-range")
    ] = None
    dynatemp_exp: Annotated[float | None, flag(SAMPLE, "Exponent of the dynamic temperature.", "--dynatemp-exp")] = None
    logit_bias: Annotated[
        list[str] | None,
        plain(
            SAMPLE,
            "Added to a token's logit, such as 15043+1 or 15043-inf.",
            "-l",
            "--logit-bias",
            metavar="ID(+|-)BIAS",
        ),
    ] = None
    samplers: Annotated[str | None, flag(SAMPLE, "Steps in their order, separated by ';'.", "--samplers")] = None
    seed: Annotated[
        int | None, flag(SAMPLE, "Seed, 0 to 4294967295; none or -1: random, and reported.", "-s", "--seed")
    ] = None
    logprobs: Annotated[
        int | None, plain(SAMPLE, "Log-probabilities of each token and of the N likeliest (--json).", "--logprobs")
    ] = None
    draws: Annotated[
        int | None, plain(SAMPLE, "N distinct draws for each position, without replacement (--json).", "--draws")
    ] = None
