"""printable.py."""

from __future__ import annotations

import pytest

from hybridgen_gguf.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 漢字 é 😀", "plain 漢字 é 😀"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x9b2J", "\\x9b2J"),
        ("gpj.\u202egguf", "gpj.\\u202egguf"),
        ("\udcff", "\\udcff"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_one_line(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_lines_and_limit() -> None:
    assert printable("a\nb\r", one_line=False) == "a\nb\\r"
    assert printable("abcdef", limit=3) == "abc…"
    assert printable("abc", limit=3) == "abc"
