"""The noise: right words, right distribution in the middle and in both tails, independent wherever it must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from chi_square import LIMIT, score

from hybridgen_gguf.sample import noise, portable
from hybridgen_gguf.sample.noise import NoiseKey

KEY = NoiseKey(2024, 3, 77)
MANY = np.arange(1 << 20)


@pytest.fixture(scope="module")
def exponentials() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """exp(-noise) of a million tokens: independent Exp(1) variables, if all is right."""
    return np.exp(-noise.gumbels(KEY, MANY))


def test_words_are_numpy_s_philox() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        seed, stream, position, start = (int(x) for x in rng.integers(0, 1 << 32, 4))
        key = NoiseKey(seed, stream << 31, position << 31)
        reference = np.random.Philox(key=seed | noise._KEY << 64, counter=key.counter(start, 1) - 1).random_raw(8)
        ids = np.arange(4 * start, 4 * start + 8)
        assert (noise._words(key, ids, 1) == reference).all()


def test_words_are_random123_s_known_answers() -> None:
    """Philox4x64-10 of the counter and key of all ones and of zeros, from the generator's own test vectors."""
    assert [hex(int(w)) for w in np.random.Philox(key=0, counter=(1 << 256) - 1).random_raw(4)] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]


def test_noise_never_changes() -> None:
    """Results of a seed must be the same in every release and on every machine."""
    got = [x.hex() for x in noise.gumbels(NoiseKey(1, 2, 3), np.array([0, 1, 63, 64, 151_935])).tolist()]
    assert got == GOLDEN


def test_logarithm_is_within_two_units_of_the_last_place() -> None:
    x = np.exp(np.random.default_rng(1).uniform(-45, 5, 200_000))
    exact = np.log(x.astype(np.longdouble))
    assert np.max(np.abs(portable.log(x) - exact) / np.spacing(np.abs(portable.log(x)))) < 2


def test_exp_is_within_two_units_of_the_last_place() -> None:
    x = np.concatenate((np.random.default_rng(1).uniform(-699, 5, 200_000), [0.0]))
    got = portable.exp(x)
    assert np.max(np.abs(got - np.exp(x.astype(np.longdouble))) / np.spacing(got)) < 2
    assert portable.exp(np.array([-np.inf, -701.0, 0.0])).tolist() == [0.0, 0.0, 1.0]


def test_exponential_is_accurate_in_both_tails() -> None:
    for bits in (58, 64):
        words = np.array([0, 1, 5, 1 << 20, 1 << (bits - 2), (1 << bits) - 1, (1 << bits) - 6], np.uint64)
        exact = [-math.log1p(-(int(w) + 0.5) / 2**bits) if w < 1 << 40 else None for w in words]
        got = noise._exponential(words, bits).tolist()
        for g, e in zip(got, exact, strict=True):
            assert e is None or math.isclose(g, e, rel_tol=1e-15)
        assert math.isclose(got[4], -math.log(0.75), rel_tol=1e-15)
        assert math.isclose(got[5], (bits + 1) * math.log(2), rel_tol=1e-15)
        assert math.isclose(got[6], bits * math.log(2) - math.log(5.5), rel_tol=1e-15)
        assert min(got) > 0 and max(got) < 46


def test_distribution_is_exponential(exponentials: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    uniform = np.sort(-np.expm1(-exponentials))
    n = len(uniform)
    distance = np.max(np.abs(uniform - (np.arange(n) + 0.5) / n)) * math.sqrt(n)
    assert distance < 2.7  # Kolmogorov and Smirnov, false-alarm rate 1e-6


@pytest.mark.parametrize("expected", [30, 1000, 50_000])
def test_tails_are_as_heavy_as_they_must_be(
    exponentials: np.ndarray[tuple[int], np.dtype[np.float64]], expected: int
) -> None:
    share = expected / len(exponentials)
    for hits in (np.sum(exponentials < -math.log1p(-share)), np.sum(exponentials > -math.log(share))):
        assert abs(int(hits) - expected) < LIMIT * math.sqrt(expected)


def test_tokens_of_one_block_are_independent(exponentials: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """The counts of small values in blocks of 64 are binomial only if the two tiers fit together."""
    blocks = exponentials.reshape(-1, noise.BLOCK)
    for share in (0.01, 0.1, 0.5):
        counts = np.bincount((blocks < -math.log1p(-share)).sum(axis=1), minlength=noise.BLOCK + 1)
        binomial = [math.comb(64, i) * share**i * (1 - share) ** (64 - i) for i in range(65)]
        assert abs(score(counts, np.array(binomial))) < LIMIT
    owners = np.bincount(blocks.argmin(axis=1), minlength=noise.BLOCK)
    assert abs(score(owners, np.ones(noise.BLOCK))) < LIMIT
    second = np.bincount(np.argsort(blocks, axis=1)[:, 1], minlength=noise.BLOCK)
    assert abs(score(second, np.ones(noise.BLOCK))) < LIMIT


@pytest.mark.parametrize(
    "other",
    [NoiseKey(2025, 3, 77), NoiseKey(2024, 4, 77), NoiseKey(2024, 3, 78), NoiseKey(3, 2024, 77), NoiseKey(2024, 77, 3)],
)
def test_seeds_streams_and_positions_share_nothing(other: NoiseKey) -> None:
    ids = np.arange(200_000)
    a, b = noise.gumbels(KEY, ids), noise.gumbels(other, ids)
    assert not (a == b).any()
    for shift in (0, 1, 64):
        correlation = float(np.corrcoef(a[shift:], b[: len(b) - shift])[0, 1])
        assert abs(correlation) < LIMIT / math.sqrt(len(ids))


def test_a_token_s_noise_does_not_depend_on_the_others_asked_for() -> None:
    everything = noise.gumbels(KEY, np.arange(1000))
    some = np.array([999, 3, 640, 64, 63, 3])
    assert (noise.gumbels(KEY, some) == everything[some]).all()


def test_coins_are_uniform() -> None:
    coins = np.array([noise.coin(NoiseKey(5, 0, position)) for position in range(4000)])
    assert abs(score(np.bincount((coins * 16).astype(np.int64), minlength=16), np.ones(16))) < LIMIT


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 20_000])
@pytest.mark.parametrize("k", [1, 2, 17])
def test_the_best_are_found_without_looking_at_all(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    for position, spread in enumerate((0.0, 0.5, 3.0, 12.0)):
        key = NoiseKey(9, 1, position)
        logits = rng.normal(0, spread, n).astype(np.float32)
        logits[rng.integers(0, n, n // 4)] = -np.inf
        if logits.max() == -np.inf:
            continue
        scores = (logits.astype(np.float64) - float(logits.max())) / 0.8
        plain = noise._select(np.arange(n), scores + noise.gumbels(key, np.arange(n)), k)
        for found in (
            noise.best_of(key, np.arange(n), scores, k),
            noise.best_of_all(key, logits, float(logits.max()), 0.8, k),
        ):
            assert found.ids.tolist() == plain.ids.tolist()
            assert found.keys.tolist() == plain.keys.tolist()


def test_outsiders_are_all_whose_noise_is_large_enough() -> None:
    everything = noise.gumbels(KEY, np.arange(10_000))
    for limit in (5.0, 9.0, 20.0):
        assert noise.outsiders(KEY, 10_000, limit).tolist() == np.flatnonzero(everything >= limit).tolist()


GOLDEN = [
    "0x1.4b65db9ebf771p+1",
    "0x1.b18075d6fa2eep-2",
    "0x1.ba2db2e8c7fecp-4",
    "0x1.0d94bfed3afc3p+0",
    "0x1.1deabd3e7fa56p+1",
]
