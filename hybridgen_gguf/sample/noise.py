"""Gumbel noise that is a function of (seed, stream, position, token) and of nothing else, and the k best noisy scores.

The noise of a vocabulary is made in two tiers, so that one random word rules out 64 tokens. Tokens are taken in blocks
of 64 (0-63, 64-127, ...). With E = exp(-Gumbel), the E of a block are 64 independent Exp(1) variables. Their smallest,
`least`, is Exp(1)/64; which token has it is uniform; every other one is `least` plus a fresh Exp(1), because the
exponential distribution has no memory. So one word per block gives the largest noise anywhere in it and its owner, and
the word of a single token is needed only where `largest score in the block + largest noise of the block` could still
win. The result is exactly that of 64 independent draws; nothing is bounded away.

Words come from Philox4x64-10 (numpy's generator: same words, same order) under key (seed, `_KEY`) and counter
(index // 4, position, stream, tier), word index % 4. A block's word gives 58 bits to `least` and 6 to its owner; a
token's word gives it 64 bits. Both tails are accurate: -log1p(-u) below 1/4, -log(1-u) with 1-u made from the
complement above.

Logarithms are portable.py's, so that every machine, and the engine's own C++, get the same bits. Knows no logits'
origin, no chain, no engine.
Invariant: a token's noise does not depend on which other tokens were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .portable import double_artanh, log

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

BLOCK = 64
SLACK = 1e-9  # a bound may be short by a few roundings (about 1e-14 of it); comparing with this margin keeps it a bound

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_KEY = 0x6867_6775_6D62_656C
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_TIER_BLOCK, _TIER_TOKEN, _TIER_COIN = 0, 1, 2


@dataclass(frozen=True)
class NoiseKey:
    """What one draw's noise depends on besides the token: `seed` (32 bits), `stream` and `position` (64 bits each)."""

    seed: int
    stream: int
    position: int

    def counter(self, index: int, tier: int) -> int:
        """Philox's 256-bit counter of word group `index`, as numpy takes it."""
        return index | self.position << 64 | self.stream << 128 | tier << 192


@dataclass(frozen=True)
class Best:
    """The k best of a set, best first: token ids and their keys (score + noise), of equal length."""

    ids: Ids
    keys: Floats


def gumbels(key: NoiseKey, ids: Ids) -> Floats:
    """Standard Gumbel noise of each token of `ids`, float64, independent between tokens."""
    return np.asarray(-log(_exponentials(key, ids, _block_words(key, ids // BLOCK))))


def coin(key: NoiseKey) -> float:
    """One uniform number in [0, 1) of this position, for a step that needs a coin; independent of every token's
    noise."""
    word = int(_philox(key, np.zeros(1, np.uint64), _TIER_COIN)[0][0])
    return (word >> 11) * 2.0**-53


def best_of(key: NoiseKey, ids: Ids, scores: Floats, k: int) -> Best:
    """The `k` largest of `scores + noise` among the tokens `ids`; ties go to the smaller id; scores of -inf never
    win."""
    first = 64 + 4 * k
    if len(ids) <= first:
        return _select(ids, scores + gumbels(key, ids), k)
    bounds = scores + _block_limits(key, int(ids.max()) // BLOCK + 1)[ids // BLOCK] + SLACK
    near = np.argpartition(bounds, -first)[-first:]
    keys = scores[near] + gumbels(key, ids[near])
    at_least = np.partition(keys, -k)[-k]
    bounds[near] = -np.inf
    more = np.flatnonzero(bounds >= at_least) if at_least > -np.inf else np.flatnonzero(bounds > -np.inf)
    if len(more):
        near, keys = np.concatenate((near, more)), np.concatenate((keys, scores[more] + gumbels(key, ids[more])))
    return _select(ids[near], keys, k)


def best_of_all(key: NoiseKey, logits: NDArray[np.float32], largest: float, temperature: float, k: int) -> Best:
    """`best_of` over the whole vocabulary with scores `(logits - largest) / temperature`, `temperature` > 0.

    One pass over the logits finds each block's largest; only blocks that can still win are looked into.
    """
    n = len(logits)
    n_blocks = -(-n // BLOCK)
    tops = np.maximum.reduceat(logits, np.arange(0, n, BLOCK)).astype(np.float64)
    with np.errstate(over="ignore"):
        bounds = (tops - largest) / temperature + _block_limits(key, n_blocks) + SLACK
    first = min(n_blocks, 4 + k)
    near = np.argpartition(bounds, -first)[-first:] if first < n_blocks else np.arange(n_blocks)

    def best_in(blocks: Ids) -> Best:
        ids = _tokens_of(blocks, n)
        with np.errstate(over="ignore"):
            scores = (logits[ids].astype(np.float64) - largest) / temperature
        return best_of(key, ids, scores, k)

    found = best_in(near)
    at_least = found.keys[-1] if len(found.keys) == k else -np.inf
    bounds[near] = -np.inf
    more = np.flatnonzero((bounds >= at_least) & (bounds > -np.inf))
    if len(more):
        rest = best_in(more)
        found = _select(np.concatenate((found.ids, rest.ids)), np.concatenate((found.keys, rest.keys)), k)
    return found


def outsiders(key: NoiseKey, n_vocab: int, at_least: float) -> Ids:
    """Every token of the vocabulary whose noise alone is `at_least` or more (to 1e-9): those that can still win."""
    blocks = np.flatnonzero(_block_limits(key, n_vocab // BLOCK + 1) + SLACK >= at_least)
    ids = _tokens_of(blocks, n_vocab)
    return ids[gumbels(key, ids) + SLACK >= at_least]


def _tokens_of(blocks: Ids, n_vocab: int) -> Ids:
    ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    return ids[ids < n_vocab]


def _select(ids: Ids, keys: Floats, k: int) -> Best:
    order = np.lexsort((ids, -keys))[:k]
    order = order[keys[order] > -np.inf]
    return Best(ids[order], keys[order])


def _block_limits(key: NoiseKey, n_blocks: int) -> Floats:
    """The largest noise inside each of the first `n_blocks` blocks. The words come from numpy's generator in one
    run."""
    start = (key.counter(0, _TIER_BLOCK) - 1) % (1 << 256)  # numpy steps its counter before each group
    words = np.random.Philox(key=key.seed | _KEY << 64, counter=start).random_raw(n_blocks)
    return np.asarray(-log(_least(words)))


def _least(words: Words) -> Floats:
    """The smallest of a block's 64 exponentials, from the block's word."""
    return _exponential(words >> np.uint64(6), 58) * (1.0 / BLOCK)


def _block_words(key: NoiseKey, blocks: Ids) -> Words:
    return _words(key, blocks, _TIER_BLOCK)


def _exponentials(key: NoiseKey, ids: Ids, block_words: Words) -> Floats:
    least = _least(block_words)
    owner = (block_words & np.uint64(BLOCK - 1)).astype(np.int64) == ids % BLOCK
    return np.where(owner, least, least + _exponential(_words(key, ids, _TIER_TOKEN), 64))


def _words(key: NoiseKey, index: Ids, tier: int) -> Words:
    groups = _philox(key, (index // 4).astype(np.uint64), tier)
    return np.stack(groups)[index % 4, np.arange(len(index))]


def _philox(key: NoiseKey, groups: Words, tier: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x64-10 of many counters at once: the four words of each group."""
    x0, x1 = groups, np.full_like(groups, key.position)
    x2, x3 = np.full_like(groups, key.stream), np.full_like(groups, tier)
    k0, k1 = key.seed, _KEY
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ np.uint64(k0), low1, high0 ^ x3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK64, (k1 + _WEYL[1]) & _MASK64
    return x0, x1, x2, x3


def _multiply(a: int, b: Words) -> tuple[Words, Words]:
    """The 128-bit products of `a` and each of `b`, as high and low words."""
    a_low, a_high = np.uint64(a & _MASK32), np.uint64(a >> 32)
    b_low, b_high = b & np.uint64(_MASK32), b >> np.uint64(32)
    middle = a_high * b_low + (a_low * b_low >> np.uint64(32))
    other = a_low * b_high + (middle & np.uint64(_MASK32))
    return a_high * b_high + (middle >> np.uint64(32)) + (other >> np.uint64(32)), np.uint64(a) * b


def _exponential(words: Words, bits: int) -> Floats:
    """Exp(1) from uniform words of `bits` bits: -log(1 - u), u = (word + 1/2) / 2**bits, accurate near 0 and near 1."""
    scale = 2.0**-bits
    u = (words.astype(np.float64) + 0.5) * scale
    complement = ((words ^ np.uint64((1 << bits) - 1)).astype(np.float64) + 0.5) * scale
    return np.where(u < 0.25, double_artanh(u / (2.0 - u)), -log(complement))
