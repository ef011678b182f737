"""Decoding: chunks, reuse of what the cache holds, full contexts, cancellation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridgen_gguf.decode import Decoder
from hybridgen_gguf.engine.fake import FakeContext
from hybridgen_gguf.errors import DoesNotFit


def test_prompt_is_read_in_chunks_with_progress() -> None:
    context = FakeContext(b"x")
    seen: list[tuple[int, int]] = []
    assert Decoder(context, 10).read(list(range(25)), progress=lambda done, total: seen.append((done, total)))
    assert context.log == [10, 10, 5]
    assert seen == [(10, 25), (20, 25), (25, 25)]


def test_prompt_that_does_not_fit_names_a_context_that_would() -> None:
    with pytest.raises(DoesNotFit) as caught:
        Decoder(FakeContext(b"x", n_ctx=256), 64).read([1] * 300)
    assert caught.value.nearest == {"n_ctx": 512}
    assert "300" in caught.value.what and "256" in caught.value.what


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_reuse_leaves_the_context_with_exactly_the_new_prompt(first: list[int], second: list[int]) -> None:
    context = FakeContext(b"x")
    decoder = Decoder(context, 7)
    decoder.read(first)
    kept = decoder.reuse(second)
    assert kept < len(second)  # the last token is always read: its logits are needed
    decoder.read(second[kept:])
    assert context.tokens == decoder.tokens == second


def test_cancelled_prompt_keeps_what_was_read() -> None:
    context = FakeContext(b"x")
    decoder = Decoder(context, 10)
    calls = iter([False] * 4 + [True] * 100)
    assert not decoder.read([1] * 50, lambda: next(calls))
    assert 0 < decoder.position < 50 and context.tokens == decoder.tokens


def test_interrupted_chunk_is_forgotten() -> None:
    context = FakeContext(b"x")
    decoder = Decoder(context, 10)
    decoder.read([1] * 10)
    context.aborts = True
    assert not decoder.read([2] * 10)
    assert decoder.tokens == context.tokens == [1] * 10


def test_step_in_a_full_context_says_so() -> None:
    decoder = Decoder(FakeContext(b"x", n_ctx=4), 4)
    decoder.read([1, 2, 3, 4])
    assert not decoder.step(5)
    assert decoder.position == 4
