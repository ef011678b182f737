"""Kept sets of every step of the chain against llama.cpp's own samplers, on random logits.

llama.cpp adds probabilities in float32; where a cut falls within that rounding of a token, either answer is right, and
`assert_same` accepts a difference only there. With 64 to 1,000 tokens, as after top-k, no difference is accepted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_samplers import LlamaSamplers, LogitBias
from numpy.typing import NDArray

from hybridgen_gguf.engine.handles import Model
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.sample import steps as steps
from hybridgen_gguf.sample.dry import breaker_sequences
from hybridgen_gguf.sample.noise import NoiseKey
from hybridgen_gguf.sample.sampler import DEFAULT_CHAIN, SampleOptions, Sampler
from hybridgen_gguf.sample.steps import Candidates
from hybridgen_gguf.settings import ModelSettings

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def llama(engine: Library) -> LlamaSamplers:
    return LlamaSamplers(engine.llama)


def candidates(logits: Logits) -> Candidates:
    return Candidates(np.arange(len(logits)), logits.astype(np.float64), False)


def kept(c: Candidates) -> dict[int, float]:
    return {int(t): float(v) for t, v in zip(c.ids, c.logits, strict=True) if v > -np.inf}


def assert_same(ours: dict[int, float], theirs: dict[int, float], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    shift = max(ours.values()) - max(theirs.values())  # our temperature counts from the largest logit
    for token, value in theirs.items():
        assert abs(ours[token] - value - shift) <= tolerance * (1 + abs(value) + abs(shift))


def random_logits(seed: int, n: int, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)


def chain_of(sampler: Sampler, logits: Logits) -> dict[int, float]:
    """What the sampler's chain leaves for its draw."""
    edited = sampler._edits.edited(logits)
    first, chain = sampler._first(edited, sampler._chain, 0)
    return kept(sampler._run(chain, first, NoiseKey(0, 0, 0)))


STEPS: dict[str, tuple[Callable[[Candidates], Candidates], tuple[object, ...]]] = {
    "top_k 1": (lambda c: steps.top_k(c, 1), ("top_k", 1)),
    "top_k 40": (lambda c: steps.top_k(c, 40), ("top_k", 40)),
    "top_k beyond": (lambda c: steps.top_k(c, 10**6), ("top_k", 10**6)),
    "top_p 0.95": (lambda c: steps.top_p(c, 0.95), ("top_p", 0.95, 0)),
    "top_p 0.3": (lambda c: steps.top_p(c, 0.3), ("top_p", 0.3, 0)),
    "top_p 0": (lambda c: steps.top_p(c, 0.0), ("top_p", 0.0, 0)),
    "min_p 0.05": (lambda c: steps.min_p(c, 0.05), ("min_p", 0.05, 0)),
    "min_p 1": (lambda c: steps.min_p(c, 1.0), ("min_p", 1.0, 0)),
    "typical 0.9": (lambda c: steps.typical(c, 0.9), ("typical", 0.9, 0)),
    "typical 0.2": (lambda c: steps.typical(c, 0.2), ("typical", 0.2, 0)),
    "top_n_sigma 1": (lambda c: steps.top_n_sigma(c, 1.0), ("top_n_sigma", 1.0)),
    "top_n_sigma 2.5": (lambda c: steps.top_n_sigma(c, 2.5), ("top_n_sigma", 2.5)),
    "xtc 0.02": (lambda c: steps.xtc(c, 0.02), ("xtc", 1.0, 0.02, 0, 1)),
    "xtc 0.5": (lambda c: steps.xtc(c, 0.5), ("xtc", 1.0, 0.5, 0, 1)),
    "temperature 0.7": (lambda c: steps.temperature(c, 0.7), ("temp_ext", 0.7, 0.0, 1.0)),
    "temperature 0": (lambda c: steps.temperature(c, 0.0), ("temp_ext", 0.0, 0.0, 1.0)),
    "dynamic temperature": (lambda c: steps.dynamic_temperature(c, 0.8, 0.5, 1.3), ("temp_ext", 0.8, 0.5, 1.3)),
    "dynamic to 0": (lambda c: steps.dynamic_temperature(c, 0.3, 0.5, 1.0), ("temp_ext", 0.3, 0.5, 1.0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_step_keeps_what_llama_cpp_keeps(llama: LlamaSamplers, name: str) -> None:
    ours, theirs = STEPS[name]
    for seed in range(20):
        for n, spread in ((1, 1.0), (2, 1.0), (64, 1.0), (111, 3.0), (1000, 6.0)):
            logits = random_logits(seed, n, spread)
            assert_same(kept(ours(candidates(logits))), llama.run(logits, theirs), 1e-4 if "dynamic" in name else 1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_each_step_keeps_what_llama_cpp_keeps_of_a_whole_vocabulary(llama: LlamaSamplers, name: str) -> None:
    ours, theirs = STEPS[name]
    logits = random_logits(7, 32_000, 3.0)
    mine, reference = kept(ours(candidates(logits))), llama.run(logits, theirs)
    different = mine.keys() ^ reference.keys()
    assert len(different) <= 2  # a cut may fall within float32's rounding of a sum of 32,000 probabilities
    both = mine.keys() & reference.keys()
    assert_same({t: mine[t] for t in both}, {t: reference[t] for t in both}, 1e-4)


@pytest.mark.parametrize(
    "weights", [(1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (1.0, 0.0, 0.7), (0.8, -0.2, 0.1), (1.1, 0.5, 0.5)]
)
@pytest.mark.parametrize("window", [1, 5, 64])
def test_penalties_give_llama_cpp_s_own_float32_logits(
    llama: LlamaSamplers, weights: tuple[float, float, float], window: int
) -> None:
    rng = np.random.default_rng(window)
    repeat, frequency, presence = weights
    options = SampleOptions(
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repeat_last_n=window,
        samplers=("penalties",),
    )
    for seed in range(10):
        logits, history = random_logits(seed, 111), rng.integers(0, 30, 100).tolist()
        sampler = Sampler(options, n_vocab=111, seed=0)
        for token in history:
            sampler.accept(token)
        theirs = llama.run(logits, ("penalties", 111, window, *weights), history=history)
        assert kept(candidates(sampler._edits.edited(logits))) == theirs


@pytest.mark.parametrize("allowed", [0, 1, 2, 4])
@pytest.mark.parametrize("base", [1.0, 1.75, 40.0])
@pytest.mark.parametrize("window", [3, 30, 200])
def test_dry_gives_llama_cpp_s_own_float32_logits(llama: LlamaSamplers, allowed: int, base: float, window: int) -> None:
    options = SampleOptions(
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=window,
        samplers=("dry",),
    )
    step = ("dry", None, 0.8, base, allowed, window, None, 0)
    for seed in range(12):
        alphabet = 1 + seed % 4  # few symbols, so that long repetitions overlap
        history = np.random.default_rng(seed).integers(0, alphabet, 150).tolist()
        logits = random_logits(seed, 111)
        sampler = Sampler(options, n_vocab=111, seed=0)
        for token in history:
            sampler.accept(token)
        assert_same(kept(candidates(sampler._edits.edited(logits))), llama.run(logits, step, history=history))


def test_logit_bias_adds_and_bans(llama: LlamaSamplers) -> None:
    bias = ((3, 1.5), (7, -np.inf), (110, -0.25))
    logits = random_logits(1, 111)
    table = (LogitBias * len(bias))(*(LogitBias(token, value) for token, value in bias))
    sampler = Sampler(SampleOptions(logit_bias=bias, samplers=()), n_vocab=111, seed=0)
    assert kept(candidates(sampler._edits.edited(logits))) == llama.run(logits, ("logit_bias", 111, len(bias), table))


CHAINS: list[dict[str, object]] = [
    {},
    {"temperature": 1.7, "top_k": 0, "min_p": 0.02},
    {"top_n_sigma": 2.0, "top_k": 40, "typical_p": 0.8},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "dynatemp_range": 0.4},
    {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "dry_multiplier": 0.7},
    {"samplers": ("temperature", "min_p", "top_p", "top_k", "penalties"), "repeat_penalty": 1.3, "top_k": 20},
    {"samplers": ("top_k", "dry", "xtc", "typ_p"), "dry_multiplier": 0.5, "xtc_probability": 1.0, "typical_p": 0.7},
    {"samplers": tuple(reversed(DEFAULT_CHAIN)), "top_n_sigma": 2.0, "typical_p": 0.9, "xtc_probability": 1.0},
]


@pytest.mark.parametrize("settings", CHAINS, ids=str)
def test_whole_chains_keep_what_llama_cpp_keeps(llama: LlamaSamplers, settings: dict[str, object]) -> None:
    o = SampleOptions(**settings)  # type: ignore[arg-type]
    table = {
        "penalties": ("penalties", 1000, o.repeat_last_n, o.repeat_penalty, o.frequency_penalty, o.presence_penalty),
        "dry": ("dry", None, o.dry_multiplier, o.dry_base, o.dry_allowed_length, o.dry_penalty_last_n, None, 0),
        "top_n_sigma": ("top_n_sigma", o.top_n_sigma),
        "top_k": ("top_k", o.top_k),
        "typ_p": ("typical", o.typical_p, 0),
        "top_p": ("top_p", o.top_p, 0),
        "min_p": ("min_p", o.min_p, 0),
        "xtc": ("xtc", o.xtc_probability, o.xtc_threshold, 0, 1),
        "temperature": ("temp_ext", o.temperature, o.dynatemp_range, o.dynatemp_exponent),
    }
    for seed in range(20):
        logits = random_logits(seed, 1000, 1.0 + seed % 5)
        history = np.random.default_rng(seed).integers(0, 5, 90).tolist()
        sampler = Sampler(o, n_vocab=1000, seed=0)
        for token in history:
            sampler.accept(token)
        theirs = llama.run(logits, *(table[name] for name in o.samplers), history=history)
        assert_same(chain_of(sampler, logits), theirs)


def test_typical_ignores_banned_tokens() -> None:
    """llama.cpp's entropy is NaN once a token of -inf is left (after top-n-sigma): nothing to compare with."""
    logits = np.array([2.0, 1.0, 0.0, -np.inf, -np.inf], np.float32)
    without = steps.typical(candidates(logits[:3]), 0.8)
    assert kept(steps.typical(candidates(logits), 0.8)) == kept(without)


def test_breakers_are_found_over_token_borders() -> None:
    pieces = [b"a", b"\n", b"x\n", b"ab", b"b:", b"<", b"<<", b"a<b", b"/s>"]

    def tokenize(text: bytes) -> list[int]:
        return [pieces.index(text[i : i + 1]) if text[i : i + 1] in pieces else 100 + text[i] for i in range(len(text))]

    assert breaker_sequences(["\n"], pieces, tokenize) == ((1,), (2,))
    assert breaker_sequences(["<a"], pieces, tokenize) == ((5, 0), (6, 0))
    assert breaker_sequences([""], pieces, tokenize) == ()


def test_a_repetition_is_not_followed_across_a_breaker() -> None:
    history = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2]
    for sequences, penalised in (((), True), (((9,),), False), (((3, 9),), False), (((4, 9),), True)):
        options = SampleOptions(
            dry_multiplier=1.0, dry_allowed_length=3, samplers=("dry",), dry_sequence_breakers=sequences
        )
        sampler = Sampler(options, n_vocab=16, seed=0)
        for token in history:
            sampler.accept(token)
        logits = np.zeros(16, np.float32)
        assert bool(sampler._edits.edited(logits)[3] < 0) is penalised


def test_breakers_stop_dry_as_llama_cpp_s_own_do(llama: LlamaSamplers, tmp_path: Path) -> None:
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(chr(97 + i) for i in range(26)),
        ":",
        "b:",
        "ab",
        "x<",
        "<",
        "<end>",
        "end>",
        "z<e",
    ]
    model = Model(write_vocabulary(tmp_path / "vocabulary.gguf", words), ModelSettings(), vocab_only=True)
    with model:
        pieces = [model.token_bytes(token, special=True) for token in range(model.n_vocab)]
        texts = [":", "<end>"]
        sequences = breaker_sequences(texts, pieces, lambda text: model.tokenize(text, False, False))
        assert any(len(sequence) > 1 for sequence in sequences)
        array = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        n = model.n_vocab
        options = SampleOptions(
            dry_multiplier=0.8, dry_allowed_length=1, samplers=("dry",), dry_sequence_breakers=sequences
        )
        for seed in range(60):
            history = np.random.default_rng(seed).choice([3, 4, 29, 32, 33, 35, 36], 40).tolist()
            logits = random_logits(seed, n)
            sampler = Sampler(options, n_vocab=n, seed=0)
            for token in history:
                sampler.accept(token)
            step = ("dry", model.vocab, 0.8, 1.75, 1, 64, array, len(texts))
            assert_same(kept(candidates(sampler._edits.edited(logits))), llama.run(logits, step, history=history))


def write_vocabulary(path: Path, words: list[str]) -> Path:
    """A GGUF file that holds a SentencePiece vocabulary and nothing else."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    writer.add_token_list([*words, *bytes_])
    writer.add_token_scores([0.0] * (len(words) + 256))
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.NORMAL] * (len(words) - 3) + [gguf.TokenType.BYTE] * 256
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
