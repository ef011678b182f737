"""Thoughts and answer: however a text is cut, over tokens or inside characters, the same comes out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.answer import AnswerStream
from hybridgen_gguf.prompt.reasoning import KNOWN, Marks, ThoughtSplitter, split

HARMONY = KNOWN[-1]
SHOWN = Marks("<think>", "</think>", "\n</think>\n\n")
MARKS = st.sampled_from(
    [*KNOWN, SHOWN, Marks("to=self<|message|>", "<|eom|>", "<|eom|><|start|>x", "to=user<|message|>")]
)
PLAIN = ["a", " ", "\n", "漢", "😀", "<", ">", "/", "think", "<|", "|>", "x y", "[", "]"]


def texts(marks: Marks) -> st.SearchStrategy[str]:
    whole = [marks.open, marks.close, marks.closing, marks.answer, marks.between, "<|start|>assistant" + marks.open]
    parts = [part[:at] for part in whole for at in range(1, len(part) + 1, 3)] + whole
    return st.lists(st.sampled_from([*PLAIN, *parts]), max_size=10).map("".join)


CASES = MARKS.flatmap(lambda marks: st.tuples(st.just(marks), texts(marks), st.booleans()))


@settings(max_examples=500, deadline=None)
@given(CASES, st.data())
def test_cuts_do_not_matter(case: tuple[Marks, str, bool], data: st.DataObject) -> None:
    marks, text, inside = case
    expected = split(text, marks, inside)
    splitter = ThoughtSplitter(marks, inside)
    pieces = []
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        pieces.append(splitter.push(text[at : at + size]))
        at += size
    pieces.append(splitter.finish())
    assert tuple(map("".join, zip(*pieces, strict=True))) == expected
    assert splitter.finish() == ("", "")


def by_hand(text: str, open_: str, close: str, inside: bool) -> tuple[str, str]:
    """The rule for marks without a header, on a whole text."""
    if not inside:
        if not text.lstrip().startswith(open_):
            return "", text
        text = text.lstrip()[len(open_) :]
    thoughts, _, answer = text.partition(close)
    return thoughts.strip(), answer.lstrip()


@settings(max_examples=500, deadline=None)
@given(texts(SHOWN), st.booleans())
def test_plain_marks_follow_the_rule(text: str, inside: bool) -> None:
    assert split(text, SHOWN, inside) == by_hand(text, "<think>", "</think>", inside)


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_text_without_marks_at_its_start_comes_out_whole(case: tuple[Marks, str, bool]) -> None:
    marks, text, _ = case
    spelled = "x" + text
    assert split(spelled, marks) == ("", spelled)


@settings(max_examples=300, deadline=None)
@given(CASES, st.sampled_from(["auto", "deepseek", "none", "deepseek-legacy"]))
def test_bytes_and_control_tokens(case: tuple[Marks, str, bool], form: str) -> None:
    """Each byte a token, the opening mark a control token too: what is shown is the text, nothing twice."""
    marks, text, inside = case

    def token_bytes(token: int, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else marks.open.encode() * special

    stream = AnswerStream(token_bytes, (), marks, control={marks.open: 300}, inside=inside, form=form)
    pieces = [stream.push(byte) for byte in text.encode()]
    pieces.append(stream.finish())
    assert "".join(piece.text for piece in pieces) == stream.text
    assert "".join(piece.reasoning for piece in pieces) == (stream.reasoning or "")
    if form in ("none", "deepseek-legacy"):
        assert stream.text == text
    if not inside and not (marks.answer and text.lstrip().startswith(marks.answer)):
        assert stream.answer == text  # bytes that spell a control token are text, and never open thoughts
    assert stream.finish() == ("", "")


def test_control_tokens_are_marks_and_their_spelling_is_text() -> None:
    control = {"<|channel|>": 300, "<|message|>": 301, "<|end|>": 302, "<|start|>": 303}
    spelled = {token: text for text, token in control.items()}

    def token_bytes(token: int, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else spelled[token].encode() * special

    def run(tokens: list[int]) -> tuple[str | None, str]:
        stream = AnswerStream(token_bytes, (), HARMONY, control=control)
        for token in tokens:
            stream.push(token)
        stream.finish()
        return stream.reasoning, stream.text

    final = [303, *b"assistant", 300, *b"final", 301]
    assert run([300, *b"analysis", 301, *b"say <|end|>", 302, *final, *b"y <|end|>"]) == ("say <|end|>", "y <|end|>")
    assert run([*b"<|channel|>analysis<|message|>x"]) == ("", "<|channel|>analysis<|message|>x")
    assert run([300, *b"analysis", 301, *b"x", 302, *final[:14]]) == ("x", "")
