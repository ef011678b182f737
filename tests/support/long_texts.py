"""Texts that tokenizers have died of or crawled through, of any length. Each is a pattern that repeats."""

from __future__ import annotations

import random
from collections.abc import Callable

_PATTERNS = {
    "letter": "A",
    "alternating": "aB",
    "spaces": " ",
    "newlines": "\n",
    "space-newline": " \n",
    "digits": "7",
    "punctuation": "!",
    "quotes": "'",
    "contractions": "'s",
    "marks": "\u0301",
    "marked": "e\u0301",
    "han": "漢",
    "wide-spaces": "\u3000",
    "emoji": "👩🏽\u200d",
    "words": "the ",
    "minified": "a=b;",
    "begun-special": "<|reserved_",
    "chat": "<|im_start|>user\nhi<|im_end|>\n",
    "tools": "<tool> x     ",
    "dna": "<dna>ACGTACGTn</dna>",
}


def _then_letter(sign: str) -> Callable[[int], bytes]:
    """One run that ends in something else: what looked at it from every place takes time quadratic in it."""
    return lambda size: (sign * (size - 1) + "x").encode()


def _broken(size: int) -> bytes:
    return (b"\xe6\xbc" * size)[:size]


def _mixed(size: int) -> bytes:
    rng = random.Random(size)
    pools = ["abcXYZ", "  \t\n", "0123", "'sS!?<|>", "é漢\u0301😀", "ЖЯ"]
    return "".join(rng.choice(rng.choice(pools)) * rng.choice((1, 1, 1, 9)) for _ in range(size)).encode()


def _repeated(pattern: str) -> Callable[[int], bytes]:
    return lambda size: (pattern * (size // len(pattern) + 1))[:size].encode()


TEXTS: dict[str, Callable[[int], bytes]] = {
    **{name: _repeated(pattern) for name, pattern in _PATTERNS.items()},
    "spaces-letter": _then_letter(" "),
    "digits-letter": _then_letter("7"),
    "newlines-letter": _then_letter("\n"),
    "broken-utf8": _broken,
    "past-unicode": lambda size: (b"\xf7\xbf\xbf\xbf" * size)[:size],
    "mixed": _mixed,
}
