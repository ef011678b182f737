"""text.py against the plain oracle: decode everything, cut at the earliest stop string."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.text import TextStream

UTF8_BYTES = bytes.fromhex("00 41 62 7f 80 90 98 9f a0 bf c0 c3 e0 e4 ed ef f0 f4 f5 ff")
WORDS = st.text(alphabet="abc漢😀", min_size=1, max_size=4)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(edges)]


def run(pieces: list[bytes], stops: list[str]) -> tuple[str, str | None]:
    stream = TextStream(lambda token: pieces[token], stops)
    shown = [stream.push(token) for token in range(len(pieces))] + [stream.finish()]
    assert all(part.encode() is not None for part in shown)
    assert "".join(shown) == stream.text
    return stream.text, stream.stopped


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(UTF8_BYTES), max_size=40).map(bytes), st.lists(st.integers(0, 40), max_size=40))
def test_any_split_of_any_bytes_decodes_the_same(data: bytes, cuts: list[int]) -> None:
    assert run(split(data, cuts), [])[0] == data.decode("utf-8", "replace")


@settings(max_examples=600, deadline=None)
@given(
    st.text(alphabet="abc漢😀", max_size=40), st.lists(WORDS, max_size=5), st.lists(st.integers(0, 120), max_size=40)
)
def test_cut_is_at_the_earliest_stop_for_any_split(text: str, stops: list[str], cuts: list[int]) -> None:
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    shown, stopped = run(split(text.encode(), cuts), stops)
    assert shown == (text[: min(found)] if found else text)
    assert (stopped is not None) == bool(found)
    if stopped is not None:
        assert text.startswith(stopped, min(found))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4))
def test_no_more_is_held_back_than_could_still_be_a_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(lambda token: bytes([token]), stops)
    for at, byte in enumerate(text.encode(), 1):
        stream.push(byte)
        if stream.stopped is not None:
            return
        seen = text[:at]
        if not any(stop in seen for stop in stops):
            held = next(n for n in range(at, -1, -1) if n == 0 or any(s.startswith(seen[at - n :]) for s in stops))
            assert stream.text == seen[: at - held]
