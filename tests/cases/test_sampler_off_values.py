"""D-20: "off" values that are off. Top-k 0, -1 or past the vocabulary mean all tokens; top-k 1 is temperature 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chi_square import LIMIT, score

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.engine.native_sample import NativeSample
from hybridgen_gguf.sample.sampler import NativeSampler, SampleOptions, Sampler


@pytest.fixture(params=["native", "numpy"])
def native(request: pytest.FixtureRequest, engine: Library) -> NativeSampler | None:
    return NativeSample(engine.llama) if request.param == "native" else None


def text(options: SampleOptions, seed: int, native: NativeSampler | None, n: int = 49_152) -> tuple[int, ...]:
    logits = [np.random.default_rng(position).normal(0, 2, n).astype(np.float32) for position in range(8)]
    sampler = Sampler(options, n_vocab=n, seed=seed, native=native)
    return tuple(sampler.draw(row, position).token for position, row in enumerate(logits))


def test_off_values(native: NativeSampler | None) -> None:
    whole = [SampleOptions(top_k=k, top_p=1.0, min_p=0.0, temperature=1.0) for k in (0, -1, 49_152, 49_153)]
    assert len({text(options, 3, native) for options in whole}) == 1
    assert len({text(whole[0], seed, native) for seed in range(20)}) == 20
    assert text(SampleOptions(top_k=1), 3, native) == text(SampleOptions(temperature=0.0), 4, native)


def test_gumbel_top_k_with_k_the_vocabulary_draws_the_softmax_and_no_token_twice(engine: Library) -> None:
    logits = np.random.default_rng(0).normal(0, 1, 111).astype(np.float32)
    options = SampleOptions(top_k=111, top_p=1.0, min_p=0.0, temperature=1.0, draws=111)
    sampler = Sampler(options, n_vocab=111, seed=1, native=NativeSample(engine.llama))
    single = Sampler(replace(options, draws=0), n_vocab=111, seed=1, native=NativeSample(engine.llama))
    first = np.zeros(50_000, np.int64)
    for position in range(len(first)):
        order = [s.token for s in sampler.draw(logits, position).draws] if position < 500 else None
        assert order is None or sorted(order) == list(range(111))
        first[position] = order[0] if order else single.draw(logits, position).token
    assert abs(score(np.bincount(first, minlength=111), np.exp(logits.astype(np.float64)))) < LIMIT
