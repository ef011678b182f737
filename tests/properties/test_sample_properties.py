"""For any logits and settings: results stay inside what is allowed, and every way to compute them agrees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridgen_gguf.errors import SampleError
from hybridgen_gguf.sample.dry import _repeats, dry_penalties
from hybridgen_gguf.sample.sampler import DEFAULT_CHAIN, DeviceCandidates, SampleOptions, Sampler, device_candidates

shares = st.floats(0, 1)
options = st.builds(
    SampleOptions,
    temperature=st.floats(0, 5),
    dynatemp_range=st.sampled_from([0.0, 0.5]),
    top_k=st.integers(-1, 60),
    top_p=shares,
    min_p=shares,
    typical_p=shares,
    top_n_sigma=st.floats(-1, 4),
    xtc_probability=shares,
    xtc_threshold=shares,
    repeat_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-1, 1),
    presence_penalty=st.floats(-1, 1),
    repeat_last_n=st.integers(-1, 8),
    dry_multiplier=st.sampled_from([0.0, 1.0]),
    samplers=st.permutations(DEFAULT_CHAIN).map(tuple),
    draws=st.integers(0, 4),
    logprobs=st.integers(0, 3),
)
rows = st.lists(st.sampled_from([-np.inf, -30.0, -1.0, 0.0, 0.5, 2.0, 9.0]), min_size=1, max_size=50)


@settings(max_examples=100, deadline=None)
@given(options, rows, st.integers(0, 2**32 - 1), st.integers(0, 2**62), st.lists(st.integers(0, 5), max_size=12))
def test_a_draw_is_an_allowed_token_or_a_stated_error(
    chosen: SampleOptions, row: list[float], seed: int, position: int, history: list[int]
) -> None:
    logits: NDArray[np.float32] = np.array(row, np.float32)
    sampler = Sampler(chosen, n_vocab=len(row), seed=seed)
    for token in history:
        sampler.accept(token % len(row))
    try:
        draw = sampler.draw(logits, position)
    except SampleError:
        assert logits.max() == -np.inf
        return
    assert logits[draw.token] > -np.inf
    assert draw == sampler.draw(logits, position)
    assert len({s.token for s in draw.draws}) == len(draw.draws) <= chosen.draws
    assert all(s.logprob <= 1e-12 for s in (*draw.draws, *draw.top))


@settings(max_examples=100, deadline=None)
@given(options, rows, st.integers(0, 2**32 - 1))
def test_candidates_never_choose_otherwise(chosen: SampleOptions, row: list[float], seed: int) -> None:
    logits = np.array(row, np.float32)
    count = device_candidates(chosen, len(row))
    if count is None or logits.max() == -np.inf:
        return
    ids = np.argpartition(logits, -count)[-count:]
    sampler = Sampler(chosen, n_vocab=len(row), seed=seed)
    few = sampler.draw_candidates(DeviceCandidates(ids, logits[ids]), 1)
    if few is not None:
        whole = sampler.draw(logits, 1)
        assert (few.token, few.draws) == (whole.token, whole.draws)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeats_are_the_longest_common_beginnings(text: list[int]) -> None:
    for k, length in enumerate(_repeats(text)):
        expected = 0
        while k and k + expected < len(text) and text[expected] == text[k + expected]:
            expected += 1
        assert length == expected


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_dry_penalises_what_prolongs_a_repetition(history: list[int], allowed: int) -> None:
    expected = {}
    for token in set(history):
        longest = max(
            (n for n in range(len(history)) for end in range(n, len(history)) if history[end] == token
             and history[end - n : end] == history[len(history) - n :]),
            default=0,
        )  # fmt: skip
        if longest >= allowed and len(history) > allowed:
            expected[token] = 0.5 * 2.0 ** (longest - allowed)
    assert dry_penalties(history, 0.5, 2.0, allowed, {}) == expected
