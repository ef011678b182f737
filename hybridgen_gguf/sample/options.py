"""What a user can say about sampling, checked when it is said. Knows no logits. Pure.

Invariant: a `SampleOptions` that exists is usable; every value out of range raises UsageError naming its flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UsageError

DEFAULT_CHAIN = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "typ": "typ_p"}
_SEEDS = 1 << 32
_LARGEST = 1e30  # of a number that is added to logits, some million times: float32 ends at 3.4e38


@dataclass(frozen=True)
class SampleOptions:
    """Sampling settings under llama.cpp's meanings and defaults. Logit bias is applied first, then `samplers` in order.

    A step does nothing at: top_k <= 0 or at least the vocabulary, top_p 1, min_p 0, typical_p 1, top_n_sigma <= 0,
    xtc_probability 0 or xtc_threshold > 0.5, repeat_penalty 1 with frequency_penalty and presence_penalty 0,
    repeat_last_n 0, dry_multiplier 0, dry_base < 1, dry_penalty_last_n 0, temperature 1. A temperature <= 0 takes the
    most likely token. `repeat_last_n`, `dry_penalty_last_n`: tokens looked back on, -1 for all.
    `dry_sequence_breakers`: token sequences. `logit_bias`: (token, amount added), -inf bans. `logprobs`: report the
    chosen and this many best. `draws`: this many distinct tokens without replacement, with their log-probabilities.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = DEFAULT_CHAIN
    logprobs: int = 0
    draws: int = 0

    def __post_init__(self) -> None:
        for flag, value, low, high in self._ranges():
            if not low <= value <= high:  # also refuses NaN
                upper = "" if math.isinf(high) else f" and at most {high:g}"
                raise UsageError(
                    f"{flag} {value:g} is out of range", f"{flag} must be a number of at least {low:g}{upper}"
                )
        for flag, number in self._finite():
            if not abs(number) <= _LARGEST:
                what = f"{flag} {number:g} is out of range"
                raise UsageError(what, f"{flag} must be a finite number, below {_LARGEST:g} in size")
        if self.repeat_penalty <= 0 or not math.isfinite(1 / self.repeat_penalty):
            raise UsageError(
                f"--repeat-penalty {self.repeat_penalty:g} is out of range", "it must be above 0; 1 is off"
            )
        for token, bias in self.logit_bias:
            if not (abs(bias) <= _LARGEST or bias == -math.inf) or token < 0:
                raise UsageError(
                    f"--logit-bias {token}:{bias:g} is out of range", "give a token id and a finite number, or -inf"
                )
        if any(not sequence for sequence in self.dry_sequence_breakers):
            raise UsageError("--dry-sequence-breaker is empty", "give at least one character, or 'none'")
        check_samplers(self.samplers)

    def _ranges(self) -> tuple[tuple[str, float, float, float], ...]:
        inf = math.inf
        return (
            ("--dynatemp-range", self.dynatemp_range, 0, inf),
            ("--dynatemp-exp", self.dynatemp_exponent, 0, inf),
            ("--top-k", self.top_k, -1, inf),
            ("--top-p", self.top_p, 0, 1),
            ("--min-p", self.min_p, 0, 1),
            ("--typical", self.typical_p, 0, 1),
            ("--xtc-probability", self.xtc_probability, 0, 1),
            ("--xtc-threshold", self.xtc_threshold, 0, 1),
            ("--repeat-last-n", self.repeat_last_n, -1, inf),
            ("--dry-multiplier", self.dry_multiplier, 0, inf),
            ("--dry-base", self.dry_base, 0, inf),
            ("--dry-allowed-length", self.dry_allowed_length, 0, inf),
            ("--dry-penalty-last-n", self.dry_penalty_last_n, -1, inf),
            ("--logprobs", self.logprobs, 0, inf),
            ("--draws", self.draws, 0, inf),
        )

    def _finite(self) -> tuple[tuple[str, float], ...]:
        return (
            ("--temp", self.temperature),
            ("--dynatemp-range", self.dynatemp_range),
            ("--dynatemp-exp", self.dynatemp_exponent),
            ("--top-n-sigma", self.top_n_sigma),
            ("--repeat-penalty", self.repeat_penalty),
            ("--frequency-penalty", self.frequency_penalty),
            ("--presence-penalty", self.presence_penalty),
            ("--dry-multiplier", self.dry_multiplier),
            ("--dry-base", self.dry_base),
        )

    def active_steps(self) -> tuple[str, ...]:
        """The steps of `samplers` that do something, in order."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
        active = {
            "penalties": penalties and self.repeat_last_n != 0,
            "dry": self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
        }
        return tuple(name for name in self.samplers if active[name])


def parse_samplers(text: str) -> tuple[str, ...]:
    """`--samplers`: step names separated by ';' or ',', as llama.cpp spells them (`top_k`, `top-k`, `topk`, `temp`,
    ...)."""
    names = [name.strip().lower().replace("-", "_") for name in text.replace(",", ";").split(";")]
    known = {name.replace("_", ""): name for name in DEFAULT_CHAIN}
    found = tuple(_ALIASES.get(name) or known.get(name.replace("_", ""), name) for name in names if name)
    check_samplers(found)
    return found


def check_samplers(names: tuple[str, ...]) -> None:
    """UsageError for a step that is unknown or named twice."""
    for i, name in enumerate(names):
        if name not in DEFAULT_CHAIN:
            raise UsageError(f"--samplers: '{name}' is not a step", f"the steps are {', '.join(DEFAULT_CHAIN)}")
        if name in names[:i]:
            raise UsageError(f"--samplers names '{name}' twice", "name each step at most once")


def check_seed(seed: int) -> int:
    """`seed` if it is one: 0 .. 2**32 - 1, 0 being an ordinary one. UsageError otherwise."""
    if not 0 <= seed < _SEEDS:
        raise UsageError(f"--seed {seed} is out of range", f"give a number from 0 to {_SEEDS - 1}, or leave it out")
    return seed
