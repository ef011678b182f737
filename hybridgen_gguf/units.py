"""Sizes in and out: `8G`, `8GB`, `8GiB` → bytes; bytes → `8.00 GiB`. Pure; knows no flags and no files.

Invariant: G, GB and GiB all mean 2**30, as llama.cpp's users mean them; `parse_size(format_size(n))` is n within 1 %.
"""

from __future__ import annotations

import re

from .errors import UsageError

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 1 << 60


def parse_size(text: str) -> int:
    """Bytes of a size such as `512M`, `8GiB` or `1.5 GB`. Raises UsageError for anything else, and above 2**60."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text[:60]}' is not a size", "write a number and a unit, such as 8GiB or 512M")
    size = float(match[1]) * _FACTORS[match[2].upper()]
    if size > _LARGEST:
        raise UsageError(f"'{text[:60]}' is larger than any machine", "write a number and a unit, such as 8GiB or 512M")
    return int(size)


def format_size(size: int) -> str:
    """`size` bytes in the largest fitting binary unit, two decimals: `1.25 GiB`; plain bytes below 1 KiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration for people: `12.3 ms`, `4.2 s`, `3 min 05 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def round_up(size: int, step: int) -> int:
    """`size`, or the next multiple of `step` above it."""
    return -(-size // step) * step
