"""text.py: characters and stop strings over token borders."""

from __future__ import annotations

import pytest

from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.text import StopMatcher, TextStream


def stream(pieces: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    """What each push gave, and last what finish gave."""
    out = TextStream(lambda token: pieces[token], stops)
    shown = [out.push(token) for token in range(len(pieces))]
    shown.append(out.finish())
    return shown, out


def by_byte(text: str | bytes) -> list[bytes]:
    data = text.encode() if isinstance(text, str) else text
    return [data[i : i + 1] for i in range(len(data))]


def test_half_character_waits_for_its_other_half() -> None:
    shown, out = stream(by_byte("漢😀a"), [])
    assert shown == ["", "", "漢", "", "", "", "😀", "a", ""]
    assert out.text == "漢😀a"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"a\x80\x80b",
        b"\xe4\xb8a",
        b"\xed\xa0\x80x",
        b"\xf0\x9f\x98",
        b"\xc0\xaf",
        b"\xf5\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xf0\x80\x80\x80",
        b"\xe4\xe4\xb8\xad",
        b"\x00a",
    ],
)
def test_broken_bytes_are_replaced_as_decode_does(data: bytes) -> None:
    assert "".join(stream(by_byte(data), [])[0]) == data.decode("utf-8", "replace")
    assert "".join(stream([data], [])[0]) == data.decode("utf-8", "replace")


def test_broken_byte_is_shown_as_soon_as_it_is_known_to_be_broken() -> None:
    assert stream([b"a\xe4", b"b"], [])[0] == ["a", "\ufffdb", ""]


def test_tail_of_a_character_is_flushed_at_the_end() -> None:
    assert stream([b"a", b"\xf0\x9f"], [])[0] == ["a", "", "\ufffd"]


@pytest.mark.parametrize("stops", [["c", "b"], ["b", "c"]])
def test_earliest_in_the_text_wins_in_any_list_order(stops: list[str]) -> None:
    shown, out = stream([b"abc"], stops)
    assert shown == ["a", ""]
    assert out.stopped == "b"


def test_stop_of_several_tokens_never_shows_its_first_character() -> None:
    shown, out = stream([b"Count: 5", b" ", b"6", b" 7", b" 8"], [" 6 7"])
    assert shown == ["Count: 5", "", "", "", "", ""]
    assert out.stopped == " 6 7"


def test_stop_that_begins_and_ends_inside_tokens() -> None:
    shown, out = stream([b"one ST", b"OP two"], ["STOP"])
    assert "".join(shown) == "one "
    assert out.stopped == "STOP"


def test_failed_partial_match_is_released_at_once() -> None:
    assert stream([b"a", b"b", b"x"], ["abc"])[0] == ["", "", "abx", ""]


def test_only_the_part_that_can_still_match_is_held_back() -> None:
    assert stream([b"xaab", b"aac"], ["aac"])[0] == ["xaab", "", ""]
    assert stream([b"ababab", b"c"], ["ababc"])[0] == ["ab", "", ""]


def test_partial_match_is_flushed_when_the_text_ends() -> None:
    shown, out = stream([b"hello #", b"#"], ["###"])
    assert shown == ["hello ", "", "##"]
    assert out.stopped is None


def test_stop_that_began_earlier_wins_over_one_completed_earlier() -> None:
    for pieces in ([b"abcd"], [b"abc", b"d"], by_byte("abcd")):
        shown, out = stream(pieces, ["bc", "abcd"])
        assert "".join(shown) == ""
        assert out.stopped == "abcd"


def test_completed_stop_counts_when_the_earlier_one_fails_or_the_text_ends() -> None:
    for pieces in ([b"abc"], [b"abcx"], by_byte("abcx"), [b"abc", b"abcd"]):
        shown, out = stream(pieces, ["bc", "abcd"])
        assert "".join(shown) == "a"
        assert out.stopped == "bc"


def test_stop_split_inside_a_four_byte_character() -> None:
    shown, out = stream([b"hi \xf0\x9f", b"\x98", b"\x80!", b" more"], ["😀!"])
    assert "".join(shown) == "hi "
    assert out.stopped == "😀!"


def test_half_character_before_a_stop_is_flushed() -> None:
    assert "".join(stream([b"a\xe4", b"STOP"], ["STOP"])[0]) == "a\ufffd"


def test_nothing_comes_after_a_stop() -> None:
    out = TextStream(lambda token: b"ab", ["b"])
    assert [out.push(0), out.push(0), out.finish(), out.finish(), out.push(0)] == ["a", "", "", "", ""]
    assert out.text == "a"


def test_stop_completed_by_the_flush() -> None:
    shown, out = stream([b"a", b"\xf0\x9f"], ["\ufffd"])
    assert "".join(shown) == "a"
    assert out.stopped == "\ufffd"


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_unusable_stop_is_refused(stop: str) -> None:
    with pytest.raises(UsageError, match="stop string"):
        TextStream(lambda token: b"", ["a", stop])


def test_many_long_stops_cost_no_more_than_few() -> None:
    """Counted, not timed: steps of the automaton are at most two a character, for one stop string or a thousand."""
    stops = ["a" * 99 + chr(0x4E00 + i) for i in range(1000)]
    matcher = StopMatcher(stops)
    lookups = 0

    class Counting(dict[int, int]):
        def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    matcher._next = Counting(matcher._next)
    text = "a" * 98 + "b" + "a" * 500 + "漢" * 10
    matcher.feed(text)
    assert matcher.match is None
    assert lookups <= 2 * len(text) + 2
    assert len(matcher._fail) == 99 + 1000 + 1


def test_a_thousand_stops_of_a_hundred_characters() -> None:
    stops = [f"{i:03d}" * 33 + "x" for i in range(1000)]
    shown, out = stream([b"text ", b"777" * 20, b"777" * 13, b"x rest"], stops)
    assert "".join(shown) == "text "
    assert out.stopped == "777" * 33 + "x"
