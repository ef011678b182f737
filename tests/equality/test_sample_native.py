"""The engine's passes over logits: equal to numpy bit for bit, and exact draws over small and full vocabularies.

The statistical tests run here because the engine makes 100,000 draws in seconds; by the equality they hold for numpy.
Each compares with the exact softmax at a false-alarm rate of 1e-6, under fixed seeds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from chi_square import LIMIT, score
from numpy.typing import NDArray

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.engine.native_sample import NativeSample, native_sampler
from hybridgen_gguf.errors import SampleError, UsageError
from hybridgen_gguf.sample import noise
from hybridgen_gguf.sample.logits import exp_total, top_of
from hybridgen_gguf.sample.noise import NoiseKey
from hybridgen_gguf.sample.sampler import SampleOptions, Sampler

Logits = NDArray[np.float32]
OPEN = SampleOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SIZES = (1, 5, 63, 64, 65, 111, 1000, 32_000, 151_936)


@pytest.fixture(scope="module")
def native(engine: Library) -> NativeSample:
    return NativeSample(engine.llama)


def logits_of(seed: int, n: int, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)


def test_the_switch(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGGUF_SAMPLER", "numpy")
    assert native_sampler(engine.llama) is None
    monkeypatch.setenv("HGGUF_SAMPLER", "native")
    assert native_sampler(engine.llama) is not None
    monkeypatch.setenv("HGGUF_SAMPLER", "gpu")
    with pytest.raises(UsageError, match="HGGUF_SAMPLER"):
        native_sampler(engine.llama)


@pytest.mark.parametrize("key", [(0, 0, 0), (2**32 - 1, 2**63, 2**40), (7, 1, 12_345)])
def test_noise_is_numpy_s_bit_for_bit(native: NativeSample, key: tuple[int, int, int]) -> None:
    ids = np.concatenate((np.arange(5000), np.random.default_rng(0).integers(0, 1 << 40, 50_000)))
    assert (native.noise(NoiseKey(*key), ids) == noise.gumbels(NoiseKey(*key), ids)).all()


@pytest.mark.parametrize("n", SIZES)
def test_draws_are_numpy_s_bit_for_bit(native: NativeSample, n: int) -> None:
    for position, (temperature, k, spread) in enumerate(
        itertools.product((1.0, 0.7, 5.0, 1e-9), (1, 3, 50), (0.0, 4.0))
    ):
        logits = logits_of(position, n, spread)
        logits[np.random.default_rng(position).integers(0, n, n // 3)] = -np.inf
        largest = float(logits.max())
        if largest == -math.inf:
            continue
        key = NoiseKey(5, 1, position)
        reference = noise.best_of_all(key, logits, largest, temperature, k)
        found = native.best_of_all(key, logits, temperature, k)
        assert found is not None
        scores = (logits.astype(np.float64) - largest) / temperature
        for ids, keys in (found, native.best_of(key, np.arange(n), scores, k)):
            assert ids.tolist() == reference.ids.tolist()
            assert keys.tolist() == reference.keys.tolist()


@pytest.mark.parametrize("n", SIZES)
def test_the_largest_are_numpy_s(native: NativeSample, n: int) -> None:
    for k, decimals in itertools.product((1, 2, 40, 1024, n, n + 5), (1, 7)):  # one decimal: many equal logits
        logits = np.round(logits_of(k, n), decimals)
        reference = top_of(logits, k, lse=True)
        ids, values, rest_max, rest_lse = native.top(logits, k, lse=True)
        assert ids.tolist() == reference.ids.tolist()
        assert values.tolist() == reference.logits.tolist()
        assert rest_max == reference.rest_max
        assert rest_lse == reference.rest_lse or abs(rest_lse - reference.rest_lse) < 1e-6


@pytest.mark.parametrize("n", SIZES)
def test_the_total_is_numpy_s_bit_for_bit(native: NativeSample, n: int) -> None:
    for spread in (0.0, 3.0, 300.0):
        logits = logits_of(n, n, spread)
        logits[np.random.default_rng(n).integers(0, n, n // 5)] = -np.inf
        if logits.max() > -np.inf:
            assert native.exp_total(logits, float(logits.max())) == exp_total(logits, float(logits.max()))


@pytest.mark.parametrize("n", [1, 64, 100, 32_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_are_the_same_error(native: NativeSample, n: int, bad: float) -> None:
    for where in (0, n // 2, n - 1):
        logits = logits_of(0, n) if bad > -math.inf or math.isnan(bad) else np.full(n, bad, np.float32)
        logits[where] = bad
        for options in (OPEN, SampleOptions(), SampleOptions(temperature=0.0)):
            with pytest.raises(SampleError):
                Sampler(options, n_vocab=n, seed=0, native=native).draw(logits, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "top_k": 4000, "min_p": 0.0, "top_p": 0.999},
        {"top_k": 100, "top_p": 1.0, "min_p": 0.3},
        {"top_k": 7, "top_p": 0.0, "temperature": 1e-3},
        {"logprobs": 3, "top_k": 10_000, "top_p": 1.0},
        {"temperature": 0.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 0},
        {"top_k": 0, "top_p": 0.999, "min_p": 0.0},
        {"top_k": 0, "top_p": 1.0, "temperature": 2.0},
        {"repeat_penalty": 1.2, "dry_multiplier": 0.5, "logit_bias": ((9, 2.0),)},
        {"draws": 5, "logprobs": 5},
        {"xtc_probability": 0.5, "typical_p": 0.9, "dynatemp_range": 0.3, "top_n_sigma": 2.0},
    ],
    ids=str,
)
def test_whole_chains_choose_the_same(native: NativeSample, settings: dict[str, object]) -> None:
    options = SampleOptions(**settings)  # type: ignore[arg-type]
    plain, fast = (Sampler(options, n_vocab=4000, seed=8, native=n) for n in (None, native))
    for position in range(50):
        logits = np.round(logits_of(position, 4000), 1 + position % 6)
        a, b = plain.draw(logits, position), fast.draw(logits, position)
        assert (a.token, a.draws) == (b.token, b.draws)
        assert [s.token for s in a.top] == [s.token for s in b.top]
        assert [s.logprob for s in a.top] == pytest.approx([s.logprob for s in b.top], abs=1e-6)
        for sampler in (plain, fast):
            sampler.accept(a.token)


@pytest.mark.parametrize("n", [300, 40_000])
def test_rows_of_a_step_are_drawn_as_one_by_one(native: NativeSample, n: int) -> None:
    """Chains of all kinds, with a row that is no number in their midst; 40,000 x 24 is enough for several threads."""
    kinds = [{}, {"temperature": 0.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"logit_bias": ((9, 2.0),)},
             {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}, {"repeat_penalty": 1.5, "logprobs": 2},
             {"xtc_probability": 0.5}, {"draws": 2}]  # fmt: skip
    samplers = [
        Sampler(SampleOptions(**kinds[at % 8]), n_vocab=n, seed=at, stream=at % 3, native=native)  # type: ignore[arg-type]
        for at in range(24)
    ]
    logits = [logits_of(at, n) for at in range(24)]
    logits[8][5] = math.nan
    for sampler in samplers:
        sampler.accept(7)
    rows = [sampler.row(row, 11) for sampler, row in zip(samplers, logits, strict=True)]
    assert [row is None for row in rows] == [at % 8 >= 6 for at in range(24)]
    tokens = native.rows([row for row in rows if row is not None])
    drawn = iter(tokens)
    for at, (sampler, row) in enumerate(zip(samplers, rows, strict=True)):
        if row is None:
            continue
        token = next(drawn)
        if at == 8:
            assert token is None
            continue
        assert token is not None
        assert sampler.of_row(token, logits[at], 11) == sampler.draw(logits[at], 11), at


@pytest.mark.parametrize("shape", ["normal", "peaked"])
@pytest.mark.parametrize(("n", "draws"), [(111, 50_000), (32_000, 20_000), (151_936, 20_000)])
def test_chi_square_of_the_full_softmax(native: NativeSample, n: int, draws: int, shape: str) -> None:
    logits = logits_of(1, n, 1.0)
    if shape == "peaked":
        logits = (12 / np.arange(1, n + 1) ** 0.3).astype(np.float32)[np.random.default_rng(2).permutation(n)]
    sampler = Sampler(OPEN, n_vocab=n, seed=17, native=native)
    counts = np.bincount([sampler.draw(logits, position).token for position in range(draws)], minlength=n)
    assert abs(score(counts, np.exp(logits.astype(np.float64) - float(logits.max())))) < LIMIT


def test_chi_square_through_the_default_chain(native: NativeSample) -> None:
    logits = logits_of(3, 1000, 1.0)
    options = SampleOptions(temperature=1.3)
    sampler = Sampler(options, n_vocab=1000, seed=1, native=native)
    counts = np.bincount([sampler.draw(logits, position).token for position in range(20_000)], minlength=1000)
    plain = Sampler(options, n_vocab=1000, seed=1)
    first, chain = plain._first(logits, plain._chain, 0)
    kept = plain._run(chain, first, NoiseKey(0, 0, 0))
    expected = np.zeros(1000)
    expected[kept.ids] = kept.probabilities()
    assert counts[expected == 0].sum() == 0
    assert abs(score(counts[kept.ids], expected[kept.ids])) < LIMIT


def test_the_tail_is_drawn_as_often_as_it_must_be(native: NativeSample) -> None:
    """24-bit uniforms or float32 noise never reach a tail like this one: 262,144 tokens 20.5 below one."""
    logits = np.zeros(1 + 262_144, np.float32)
    logits[0] = 20.5
    expected = 100_000 * 262_144 * math.exp(-20.5) / (1 + 262_144 * math.exp(-20.5))
    assert round(expected, 1) == 32.8
    sampler = Sampler(OPEN, n_vocab=len(logits), seed=2, native=native)
    hits = [t for t in (sampler.draw(logits, position).token for position in range(100_000)) if t]
    assert abs(len(hits) - expected) < 4 * math.sqrt(expected)
    assert len({t // 4096 for t in hits}) > 15  # and from everywhere in it


def test_first_three_draws_without_replacement_follow_their_exact_distribution(native: NativeSample) -> None:
    logits = np.array([1.0, 0.5, 0.0, -0.5, 2.0, -1.0, 0.3, 0.9], np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    exact = {
        (a, b, c): p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        for a, b, c in itertools.permutations(range(8), 3)
    }
    assert sum(exact.values()) == pytest.approx(1.0)
    options = SampleOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, draws=3)
    sampler = Sampler(options, n_vocab=8, seed=4, native=native)
    seen = dict.fromkeys(exact, 0)
    for position in range(20_000):
        a, b, c = (s.token for s in sampler.draw(logits, position).draws)
        seen[a, b, c] += 1
    assert abs(score(np.array(list(seen.values())), np.array(list(exact.values())))) < LIMIT


def test_neighbouring_positions_seeds_and_streams_are_independent(native: NativeSample) -> None:
    logits = np.array([0.3, 0.0, -0.2, 0.4], np.float32)
    p = np.exp(logits.astype(np.float64))
    joint = np.outer(p, p).ravel()
    first = Sampler(OPEN, n_vocab=4, seed=10, native=native)
    a = np.array([first.draw(logits, position).token for position in range(20_001)])
    pairs = {"positions": (a[:-1], a[1:])}
    for name, sampler in {
        "seeds": Sampler(OPEN, n_vocab=4, seed=11, native=native),
        "streams": Sampler(OPEN, n_vocab=4, seed=10, stream=1, native=native),
    }.items():
        pairs[name] = a, np.array([sampler.draw(logits, position).token for position in range(20_001)])
    for x, y in pairs.values():
        assert abs(score(np.bincount(4 * x + y, minlength=16), joint)) < LIMIT
