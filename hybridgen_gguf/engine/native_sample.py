"""The engine's passes over logits (include/hg-sample.h), as an object that `sample.Sampler` takes as `native`.

Knows nothing of chains and options. Results equal the numpy code's bit for bit, so `HGGUF_SAMPLER=numpy` (the off
switch) changes the time alone. Invariant: arrays handed to C are contiguous, of the declared type, and outlive the
call.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from ctypes import byref, c_double

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError, UsageError
from ..sample.noise import NoiseKey
from ..sample.types import Row, UsualChain
from .abi.hg import SampleKey, SampleRow

_NAN, _NOT_FINITE = -1, -2


def native_sampler(llama: ctypes.CDLL) -> NativeSample | None:
    """The native sampler of the loaded library; None for an engine without it or under HGGUF_SAMPLER=numpy."""
    wanted = os.environ.get("HGGUF_SAMPLER") or "native"
    if wanted not in ("native", "numpy"):
        raise UsageError(f"HGGUF_SAMPLER={wanted} is not one of native, numpy")
    if wanted == "numpy" or not hasattr(llama, "hg_sample_top"):
        return None
    return NativeSample(llama)


class NativeSample:
    """`sample.NativeSampler` over the engine's functions. Holds no state: one object serves every thread.

    `llama`: a handle with the declarations of `abi.hg.SAMPLE`, such as `library.Library.llama`.
    """

    def __init__(self, llama: ctypes.CDLL) -> None:
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._top = llama.hg_sample_top
        self._best_of_all = llama.hg_sample_best_of_all
        self._best_of = llama.hg_sample_best_of
        self._chain = llama.hg_sample_chain
        self._rows = llama.hg_sample_rows
        self._exp_total = llama.hg_sample_exp_total
        self._noise = llama.hg_sample_noise

    def top(
        self, logits: NDArray[np.float32], k: int, *, lse: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], float, float]:
        """The k largest logits: ids, values, and with `lse` the largest and the log-sum-exp of all others (else NaN).

        A NaN anywhere gives one row of value NaN.
        """
        n = len(logits)
        k = min(k, n)
        ids, values, rest = np.empty(k, np.int32), np.empty(k, np.float32), (c_double * 2)()
        count = self._top(_floats(logits), n, k, lse, ids.ctypes.data, values.ctypes.data, rest)
        if count == _NAN:
            return np.zeros(1, np.int64), np.full(1, np.nan, np.float32), math.nan, math.nan
        _check(count)
        return ids.astype(np.int64), values, rest[0], rest[1]

    def best_of_all(
        self, key: NoiseKey, logits: NDArray[np.float32], temperature: float, k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """The k largest of (logits - max) / temperature + noise: ids and keys. None: NaN, or the largest is
        infinite."""
        n = len(logits)
        k = min(k, n)
        ids, keys = np.empty(k, np.int32), np.empty(k, np.float64)
        count = self._best_of_all(
            byref(_key(key)), _floats(logits), n, temperature, k, ids.ctypes.data, keys.ctypes.data
        )
        if count in (_NAN, _NOT_FINITE):
            return None
        _check(count)
        return ids[:count].astype(np.int64), keys[:count]

    def best_of(
        self, key: NoiseKey, ids: NDArray[np.int64], scores: NDArray[np.float64], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The k largest of scores + noise among the tokens `ids`: ids and keys."""
        n = len(ids)
        k = min(k, n)
        tokens, values = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(scores, np.float64)
        found, keys = np.empty(k, np.int32), np.empty(k, np.float64)
        count = self._best_of(
            byref(_key(key)), tokens.ctypes.data, values.ctypes.data, n, k, found.ctypes.data, keys.ctypes.data
        )
        _check(count)
        return found[:count].astype(np.int64), keys[:count]

    def chain(self, key: NoiseKey, logits: NDArray[np.float32], usual: UsualChain) -> int | None:
        """The token that `usual` and one draw give. None: a logit is NaN, or the largest is infinite."""
        steps = usual.top_k, usual.top_p, usual.log_min_p, usual.temperature
        token = self._chain(byref(_key(key)), _floats(logits), len(logits), *steps)
        if token in (_NAN, _NOT_FINITE):
            return None
        _check(token)
        return int(token)

    def rows(self, rows: Sequence[Row]) -> list[int | None]:
        """The token of each row, drawn by as many threads as pays. None: a logit is NaN, or the largest is infinite."""
        count = len(rows)
        table = (SampleRow * count)()
        for entry, (key, logits, chain) in zip(table, rows, strict=True):
            entry.key = _key(key)
            entry.logits = _floats(logits)
            entry.top_k, entry.top_p = chain.top_k, chain.top_p
            entry.log_min_p, entry.temperature = chain.log_min_p, chain.temperature
        self._rows(table, count, len(rows[0].logits), self._threads)
        tokens = [int(entry.token) for entry in table]
        if min(tokens) < _NOT_FINITE:
            _check(min(tokens))
        return [token if token >= 0 else None for token in tokens]

    def exp_total(self, logits: NDArray[np.float32], largest: float) -> float:
        """Sum of exp(logits - largest), `largest` being the largest logit."""
        return float(self._exp_total(_floats(logits), len(logits), largest))

    def noise(self, key: NoiseKey, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noise of the tokens `ids`."""
        tokens, out = np.ascontiguousarray(ids, np.int64), np.empty(len(ids), np.float64)
        self._noise(byref(_key(key)), tokens.ctypes.data, len(ids), out.ctypes.data)
        return out


def _key(key: NoiseKey) -> SampleKey:
    return SampleKey(key.seed, key.stream, key.position)


def _floats(logits: NDArray[np.float32]) -> int:
    if logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise EngineError("logits for the native sampler must be contiguous float32")
    return int(logits.__array_interface__["data"][0])  # `ctypes.data` leaves objects behind


def _check(count: int) -> None:
    if count < 0:
        raise EngineError("the native sampler ran out of memory")
