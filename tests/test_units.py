"""Sizes in and out: every spelling that users write, and what is no size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.units import format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("1", 1), ("512M", 512 << 20), ("8G", 8 << 30), ("8GB", 8 << 30), ("8GiB", 8 << 30)),
        *((" 1.5 gb ", 3 << 29), (".5k", 512), ("1T", 1 << 40), ("7b", 7), ("1048576 T", 1 << 60)),
    ],
)
def test_spellings(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", " ", "G", "8X", "-1", "1e9", "1,5G", "8 G iB", "0x10", "nan", "٣G", "8GiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_what_no_machine_has() -> None:
    with pytest.raises(UsageError, match="larger than any machine"):
        parse_size("1048577T")
    with pytest.raises(UsageError, match="larger than any machine"):
        parse_size("9" * 400)


@given(st.integers(0, 1 << 59))
def test_what_is_shown_can_be_given(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size / 100


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 << 28, "1.25 GiB"), (3 << 41, "6.00 TiB")]
)
def test_sizes_shown(size: int, shown: str) -> None:
    assert format_size(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0123, "12.3 ms"), (4.2, "4.2 s"), (119.9, "119.9 s"), (185, "3 min 05 s")]
)
def test_durations_shown(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown
