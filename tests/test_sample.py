"""Options, errors, the chain's shortcuts and the draw, in numpy alone. The engine's fast path has tests of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridgen_gguf.errors import SampleError, UsageError
from hybridgen_gguf.sample import steps as steps
from hybridgen_gguf.sample.noise import NoiseKey
from hybridgen_gguf.sample.sampler import (
    DEFAULT_CHAIN,
    DeviceCandidates,
    SampleOptions,
    Sampler,
    check_seed,
    device_candidates,
    parse_samplers,
)
from hybridgen_gguf.sample.steps import Candidates

OPEN = SampleOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def logits_of(seed: int, n: int, spread: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)


def tokens(options: SampleOptions, logits: NDArray[np.float32], seed: int = 1, count: int = 40) -> list[int]:
    sampler = Sampler(options, n_vocab=len(logits), seed=seed)
    return [sampler.draw(logits, position).token for position in range(count)]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"temperature": math.inf}, "--temp"),
        ({"temperature": math.nan}, "--temp"),
        ({"top_k": -2}, "--top-k"),
        ({"top_p": 1.01}, "--top-p"),
        ({"top_p": -0.1}, "--top-p"),
        ({"min_p": math.nan}, "--min-p"),
        ({"typical_p": 2.0}, "--typical"),
        ({"top_n_sigma": math.inf}, "--top-n-sigma"),
        ({"xtc_probability": -1.0}, "--xtc-probability"),
        ({"xtc_threshold": 1.5}, "--xtc-threshold"),
        ({"repeat_penalty": 0.0}, "--repeat-penalty"),
        ({"repeat_penalty": 1e-320}, "--repeat-penalty"),
        ({"frequency_penalty": math.nan}, "--frequency-penalty"),
        ({"presence_penalty": math.inf}, "--presence-penalty"),
        ({"repeat_last_n": -2}, "--repeat-last-n"),
        ({"dry_multiplier": -1.0}, "--dry-multiplier"),
        ({"dry_base": math.inf}, "--dry-base"),
        ({"dry_allowed_length": -1}, "--dry-allowed-length"),
        ({"dry_penalty_last_n": -5}, "--dry-penalty-last-n"),
        ({"dry_sequence_breakers": ((),)}, "--dry-sequence-breaker"),
        ({"dynatemp_range": -0.5}, "--dynatemp-range"),
        ({"dynatemp_exponent": math.nan}, "--dynatemp-exp"),
        ({"logit_bias": ((1, math.inf),)}, "--logit-bias"),
        ({"logit_bias": ((-1, 1.0),)}, "--logit-bias"),
        ({"samplers": ("top_k", "mirostat")}, "--samplers"),
        ({"samplers": ("top_k", "top_k")}, "--samplers"),
        ({"logprobs": -1}, "--logprobs"),
        ({"draws": -1}, "--draws"),
    ],
)
def test_settings_out_of_range_are_errors_that_name_the_flag(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError) as error:
        SampleOptions(**settings)  # type: ignore[arg-type]
    assert error.value.what.startswith(flag)


def test_seeds() -> None:
    assert [check_seed(seed) for seed in (0, 1, 2**32 - 1)] == [0, 1, 2**32 - 1]
    for seed in (-1, 2**32):
        with pytest.raises(UsageError, match="--seed"):
            check_seed(seed)


def test_samplers_are_parsed_under_llama_cpp_s_names() -> None:
    assert parse_samplers(";".join(DEFAULT_CHAIN)) == DEFAULT_CHAIN
    assert parse_samplers("top-k; TopP,temp;nucleus".replace("TopP,", "")) == ("top_k", "temperature", "top_p")
    assert parse_samplers("typical,minp , penalties") == ("typ_p", "min_p", "penalties")
    assert parse_samplers("") == ()
    with pytest.raises(UsageError, match="'foo'"):
        parse_samplers("top_k;foo")


def test_a_bias_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(UsageError, match="--logit-bias"):
        Sampler(SampleOptions(logit_bias=((10, 1.0),)), n_vocab=10, seed=0)


@pytest.mark.parametrize("options", [SampleOptions(), OPEN, SampleOptions(temperature=0.0), SampleOptions(top_k=0)])
def test_bad_logits_are_an_error_of_that_request(options: SampleOptions) -> None:
    sampler = Sampler(options, n_vocab=200, seed=0)
    for bad, word in ((math.nan, "NaN"), (math.inf, "infinity")):
        logits = logits_of(0, 200)
        logits[150] = bad
        with pytest.raises(SampleError, match=word):
            sampler.draw(logits, 4)
    with pytest.raises(SampleError, match="no token is left"):
        sampler.draw(np.full(200, -np.inf, np.float32), 4)
    with pytest.raises(SampleError, match="float32"):
        sampler.draw(np.zeros(199, np.float32), 4)
    assert sampler.draw(logits_of(0, 200), 4).token >= 0  # the sampler is still good


def test_all_banned_by_bias_is_an_error() -> None:
    bias = tuple((token, -math.inf) for token in range(5))
    for options in (SampleOptions(logit_bias=bias), SampleOptions(logit_bias=bias, temperature=0.0)):
        with pytest.raises(SampleError, match="no token is left"):
            Sampler(options, n_vocab=5, seed=0).draw(np.zeros(5, np.float32), 0)


def test_top_k_zero_minus_one_and_beyond_mean_all_tokens() -> None:
    logits = logits_of(1, 300, 0.5)
    base = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    results = [tokens(SampleOptions(top_k=k, **base), logits) for k in (0, -1, 300, 10**6)]  # type: ignore[arg-type]
    assert results[0] == results[1] == results[2] == results[3]
    assert len(set(results[0])) > 20


@pytest.mark.parametrize("n", [1, 2, 65, 5000])
def test_temperature_near_zero_is_greedy_without_overflow(n: int) -> None:
    for seed in range(3):
        logits = logits_of(seed, n, 1e4)
        greedy = [int(logits.argmax())] * 12
        for options in (
            SampleOptions(temperature=0.0),
            SampleOptions(temperature=-1.0),
            SampleOptions(top_k=1),
            SampleOptions(temperature=1e-30, top_k=0, top_p=1.0, min_p=0.0),
            SampleOptions(temperature=5e-324, top_k=0, top_p=1.0, min_p=0.0),
            SampleOptions(temperature=1e-30),
            SampleOptions(temperature=0.0, samplers=("temperature", "top_k", "typ_p"), typical_p=0.5),
            SampleOptions(temperature=1e-310, draws=1),
        ):
            assert tokens(options, logits, count=12) == greedy


def test_equal_largest_logits_go_to_the_smaller_id_when_greedy() -> None:
    logits = np.zeros(500, np.float32)
    logits[[77, 300]] = 2.0
    assert set(tokens(SampleOptions(temperature=0.0), logits)) == {77}
    assert set(tokens(OPEN, logits + np.where(logits > 0, 50, 0).astype(np.float32))) == {77, 300}


def test_banned_tokens_never_come() -> None:
    logits = logits_of(2, 64, 0.1)
    logits[::2] = -np.inf
    for options in (OPEN, SampleOptions(top_k=40, top_p=1.0, min_p=0.0), SampleOptions(top_k=0, draws=5)):
        assert all(token % 2 for token in tokens(options, logits, count=300))
    options = SampleOptions(top_k=0, top_p=1.0, min_p=0.0, logit_bias=tuple((t, -math.inf) for t in range(1, 63, 2)))
    assert set(tokens(options, logits)) == {63}


def test_results_depend_on_seed_stream_and_position_alone() -> None:
    logits = [logits_of(seed, 1000, 1.0) for seed in range(30)]
    one = Sampler(OPEN, n_vocab=1000, seed=5)
    forwards = [one.draw(row, position).token for position, row in enumerate(logits)]
    two = Sampler(OPEN, n_vocab=1000, seed=5)
    backwards = [two.draw(logits[position], position).token for position in reversed(range(30))]
    assert forwards == backwards[::-1]
    for other in (Sampler(OPEN, n_vocab=1000, seed=6), Sampler(OPEN, n_vocab=1000, seed=5, stream=1)):
        assert [other.draw(row, position).token for position, row in enumerate(logits)] != forwards


def test_twenty_seeds_give_twenty_texts() -> None:
    logits = logits_of(3, 5000, 1.0)
    assert len({tuple(tokens(OPEN, logits, seed, 8)) for seed in range(20)}) == 20


@pytest.mark.parametrize("step", ["top_p", "min_p"])
def test_looking_at_few_keeps_what_looking_at_all_keeps(step: str) -> None:
    for seed, value in ((0, 0.1), (1, 0.5), (2, 0.9), (3, 0.999)):
        value = value if step == "top_p" else 1 - value
        options = SampleOptions(samplers=(step,), **{step: value})  # type: ignore[arg-type]
        logits = logits_of(seed, 4000)
        sampler = Sampler(options, n_vocab=4000, seed=0)
        few, rest = sampler._first(logits, (step,), 0)
        everything = Candidates(np.arange(4000), logits.astype(np.float64), False)
        whole = steps.top_p(everything, value) if step == "top_p" else steps.min_p(everything, value)
        assert rest == () or len(whole.ids) >= 1024
        assert sorted(sampler._run(rest, few, NoiseKey(0, 0, 0)).ids.tolist()) == sorted(whole.ids.tolist())


def test_logprobs_are_the_model_s_own() -> None:
    logits = logits_of(4, 2000)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    options = SampleOptions(logprobs=5, temperature=1.5, repeat_penalty=1.5)
    sampler = Sampler(options, n_vocab=2000, seed=1)
    sampler.accept(int(logits.argmax()))
    draw = sampler.draw(logits, 0)
    assert draw.logprob == pytest.approx(exact[draw.token], abs=1e-6)
    assert [s.token for s in draw.top] == np.argsort(-logits)[:5].tolist()
    assert [s.logprob for s in draw.top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-6)
    everything = Sampler(SampleOptions(logprobs=5000), n_vocab=2000, seed=1).draw(logits, 0)
    assert len(everything.top) == 2000
    nothing = Sampler(SampleOptions(), n_vocab=2000, seed=1).draw(logits, 0)
    assert (nothing.logprob, nothing.top, nothing.draws) == (None, (), ())


def test_draws_are_distinct_and_carry_their_log_probability() -> None:
    logits = logits_of(5, 50)
    options = SampleOptions(temperature=0.7, top_k=20, top_p=1.0, min_p=0.0, draws=30)
    draws = Sampler(options, n_vocab=50, seed=1).draw(logits, 0)
    assert len(draws.draws) == len({s.token for s in draws.draws}) == 20  # no more than are possible
    assert draws.token == draws.draws[0].token
    kept = np.sort(logits)[::-1][:20].astype(np.float64) / 0.7
    assert sum(math.exp(s.logprob) for s in draws.draws) == pytest.approx(1.0)
    for s in draws.draws:
        assert s.logprob == pytest.approx(float(logits[s.token]) / 0.7 - math.log(np.exp(kept).sum()), abs=1e-6)
    single = Sampler(SampleOptions(temperature=0.7, top_k=20, top_p=1.0, min_p=0.0), n_vocab=50, seed=1)
    assert single.draw(logits, 0).token == draws.token
    greedy = Sampler(SampleOptions(temperature=0.0, draws=4), n_vocab=50, seed=1).draw(logits, 0)
    assert [(s.token, s.logprob) for s in greedy.draws] == [(int(logits.argmax()), 0.0)]


def test_penalties_forget_what_left_the_window() -> None:
    options = SampleOptions(repeat_penalty=2.0, repeat_last_n=3, temperature=0.0)
    logits = np.array([3.0, 2.0, 1.0, 0.5], np.float32)
    sampler = Sampler(options, n_vocab=4, seed=0)
    sampler.accept(0)
    assert sampler.draw(logits, 0).token == 1
    for token in (3, 3, 3):
        sampler.accept(token)
    assert sampler.draw(logits, 0).token == 0
    assert logits.tolist() == [3.0, 2.0, 1.0, 0.5]  # the caller's logits stay as they are


def test_xtc_tosses_one_coin_a_position() -> None:
    logits = np.array([2.0, 1.9, 1.8, -9.0], np.float32)
    options = SampleOptions(xtc_probability=0.5, xtc_threshold=0.1, min_p=0.0, top_p=1.0, temperature=1.0)
    got = tokens(options, logits, count=300)
    weights = np.exp(logits.astype(np.float64))
    without = float(weights[2] / weights.sum())  # the coin leaves token 2 and the unlikely one, or all
    expected = 0.5 * float(weights[2] / weights[2:].sum()) + 0.5 * without
    assert abs(got.count(2) - 300 * expected) < 4.9 * np.sqrt(300 * expected * (1 - expected))
    always = SampleOptions(xtc_probability=1.0, xtc_threshold=0.1, min_p=0.0, top_p=1.0, temperature=1.0)
    assert not {0, 1} & set(tokens(always, logits))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 41),
        ({"temperature": 0.0}, 41),
        ({"top_k": 1024}, 1025),
        ({"top_k": 1025}, None),
        ({"top_k": 0}, None),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, 1024),
        ({"repeat_penalty": 1.1}, 105),
        ({"repeat_penalty": 0.9}, None),
        ({"presence_penalty": -0.1}, None),
        ({"logit_bias": ((1, -1.0),)}, 42),
        ({"logit_bias": ((1, 1.0),)}, None),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": -1}, None),
        ({"top_n_sigma": 1.0}, None),
        ({"logprobs": 60}, 61),
        ({"samplers": ("temperature", "top_k")}, None),
    ],
)
def test_how_many_candidates_a_device_must_send(settings: dict[str, object], count: int | None) -> None:
    assert device_candidates(SampleOptions(**settings), 50_000) == count  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "dry_multiplier": 0.8},
        {"draws": 3, "logprobs": 4},
        {"xtc_probability": 0.5, "typical_p": 0.9, "dynatemp_range": 0.3},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.6},
        {"logit_bias": ((3, -2.0), (17, -math.inf))},
    ],
    ids=str,
)
def test_candidates_give_what_all_logits_give(settings: dict[str, object]) -> None:
    options = SampleOptions(**settings)  # type: ignore[arg-type]
    n, settled = 5000, 0
    sampler = Sampler(options, n_vocab=n, seed=3)
    for position in range(60):
        logits = np.round(logits_of(position, n), 2 if position % 2 else 6)  # rounded: many ties at the edge
        count = device_candidates(options, n)
        assert count
        ids = np.random.default_rng(position).permutation(np.argpartition(logits, -count)[-count:])
        wide = logits.astype(np.float64)
        few = sampler.draw_candidates(DeviceCandidates(ids, logits[ids], float(np.log(np.exp(wide).sum()))), position)
        whole = sampler.draw(logits, position)
        if few is not None:
            settled += 1
            assert (few.token, few.draws) == (whole.token, whole.draws)
            assert [s.token for s in few.top] == [s.token for s in whole.top]
        sampler.accept(whole.token)
    assert settled > 20


def test_candidates_that_do_not_settle_it_say_so() -> None:
    logits = np.zeros(1000, np.float32)  # all equal: which 41 a device picks is arbitrary
    sampler = Sampler(SampleOptions(), n_vocab=1000, seed=0)
    assert sampler.draw_candidates(DeviceCandidates(np.arange(41), logits[:41]), 0) is None
    assert sampler.draw_candidates(DeviceCandidates(np.arange(1000), logits), 0) == sampler.draw(logits, 0)
    open_ = Sampler(OPEN, n_vocab=1000, seed=0)
    for position in range(30):
        few = open_.draw_candidates(DeviceCandidates(np.arange(900), logits[:900]), position)
        token = open_.draw(logits, position).token
        assert few is None if token >= 900 else few is None or few.token == token
