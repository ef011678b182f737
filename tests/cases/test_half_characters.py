"""Half characters in the stream, and stop strings across tokens, where every byte is a token (D-22, D-23)."""

from __future__ import annotations

import random

import pytest

from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.text import TextStream

COUNT = "Count: 1 2 3 4 5 6 7 8 9 10"


def streamed(data: bytes, stops: list[str]) -> tuple[list[str], str | None]:
    stream = TextStream(lambda token: bytes([token]), stops)
    return [*(stream.push(token) for token in data), stream.finish()], stream.stopped


@pytest.mark.parametrize("seed", range(30))
def test_stream_of_random_bytes_equals_the_plain_text(seed: int) -> None:
    data = random.Random(seed).randbytes(40)
    chunks, _ = streamed(data, [])
    assert "".join(chunks) == data.decode("utf-8", "replace")
    for chunk in chunks:
        chunk.encode("utf-8")


def test_emoji_sequences_and_han_characters_survive() -> None:
    text = "Repeat: 😀🇫🇷👩\u200d👩\u200d👧 漢字"
    assert "".join(streamed(text.encode(), [])[0]) == text


@pytest.mark.parametrize(
    ("stops", "kept", "stop"),
    [
        ([" 6 7"], "Count: 1 2 3 4 5", " 6 7"),
        (["8", "6"], "Count: 1 2 3 4 5 ", "6"),
        (["6", "8"], "Count: 1 2 3 4 5 ", "6"),
        ([f"{i:04d}" * 25 for i in range(1000)], COUNT, None),
    ],
)
def test_stop_strings(stops: list[str], kept: str, stop: str | None) -> None:
    chunks, stopped = streamed(COUNT.encode(), stops)
    assert "".join(chunks) == kept
    assert stopped == stop


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError):
        streamed(b"", [""])
