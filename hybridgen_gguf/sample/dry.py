"""DRY: less chance for a token that would prolong a repetition of what was just said, as llama.cpp defines it.

Works on token ids; `breaker_sequences` turns a breaker's text into ids given the vocabulary's pieces. Pure; knows no
logits.
Invariant: time is linear in the history looked back on, also for one repeated token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

DEFAULT_BREAKERS = ("\n", ":", '"', "*")

_LOG_FLOAT_MAX = 88.7228391  # log of the largest float32: llama.cpp's bound for the exponent
_LONGEST_TEXT, _LONGEST_TAIL = 40, 20  # llama.cpp's limits, in bytes and tokens


def breaker_sequences(
    texts: Sequence[str], pieces: Sequence[bytes], tokenize: Callable[[bytes], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Every way tokens can begin a breaker: (token that holds it,), or (token that ends in its start, rest tokenized).

    `pieces[i]`: bytes of token i, control tokens included; `tokenize`: without special tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        whole = text.encode()[:_LONGEST_TEXT]
        if not whole:
            continue
        tails = {n: tuple(tokenize(whole[n:]))[:_LONGEST_TAIL] for n in range(1, len(whole))}
        for token, piece in enumerate(pieces):
            if whole in piece:
                found[(token,)] = None
            elif whole[:1] in piece:
                for n, tail in tails.items():
                    if piece.endswith(whole[:n]):
                        found[(token, *tail)] = None
    return tuple(found)


def dry_penalties(
    history: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Mapping[int, Sequence[tuple[int, ...]]],
) -> dict[int, float]:
    """DRY: what to take off the logit of each token that would prolong a repetition of the end of `history`.

    `breakers` maps a sequence's first token to its tails; no repetition is followed across one. A token that would make
    the repeated length n+1 loses multiplier * base ** (n - allowed) once n >= allowed.
    """
    n = len(history)
    if n <= allowed:
        return {}
    backwards = list(reversed(history))
    limit = _reach(backwards, breakers)
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for k, length in enumerate(_repeats(backwards)):
        repeated = min(length, limit)
        if k and repeated >= allowed and repeated > longest.get(backwards[k - 1], -1):
            longest[backwards[k - 1]] = repeated
    highest = int(_LOG_FLOAT_MAX / math.log(base)) if base > 1.000001 else 0
    return {
        token: multiplier * base ** (min(length - allowed, highest) if highest else length - allowed)
        for token, length in longest.items()
        if () not in breakers.get(token, ())
    }


def _reach(backwards: Sequence[int], breakers: Mapping[int, Sequence[tuple[int, ...]]]) -> int:
    """How many tokens from the end lie after the last breaker."""
    for i, token in enumerate(backwards):
        fits = [
            len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= i and tail == tuple(reversed(backwards[i - len(tail) : i]))
        ]
        if fits:
            return i - max(fits)
    return len(backwards)


def _repeats(text: Sequence[int]) -> list[int]:
    """The Z function: for each k, how long a prefix of `text` starts again at k; 0 for k = 0. Linear time."""
    n = len(text)
    z = [0] * n
    left = right = 0  # text[left:right] is the match that reaches furthest
    for k in range(1, n):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < n and text[length] == text[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return z
