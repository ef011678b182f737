"""llama.cpp's own samplers, driven step by step, as the reference that ours are compared with.

Knows ctypes and nothing of ours but where the engine lies. Invariant: a sampler is freed when its `with` block ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p

import numpy as np
from numpy.typing import NDArray


class TokenData(Structure):
    """struct llama_token_data."""

    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class TokenDataArray(Structure):
    """struct llama_token_data_array."""

    _fields_ = (("data", POINTER(TokenData)), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


class LogitBias(Structure):
    """struct llama_logit_bias."""

    _fields_ = (("token", c_int32), ("bias", c_float))


_ARGUMENTS = {
    "top_k": (c_int32,),
    "top_p": (c_float, c_size_t),
    "min_p": (c_float, c_size_t),
    "typical": (c_float, c_size_t),
    "temp_ext": (c_float, c_float, c_float),
    "top_n_sigma": (c_float,),
    "xtc": (c_float, c_float, c_size_t, c_uint32),
    "penalties": (c_int32, c_int32, c_float, c_float, c_float),
    "dry": (c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t),
    "logit_bias": (c_int32, c_int32, POINTER(LogitBias)),
    "dist": (c_uint32,),
    "greedy": (),
}


class LlamaSamplers:
    """The samplers of a loaded libllama."""

    def __init__(self, llama: ctypes.CDLL) -> None:
        self.llama = llama
        for name, arguments in _ARGUMENTS.items():
            function = llama[f"llama_sampler_init_{name}"]
            function.restype, function.argtypes = c_void_p, arguments
            setattr(self, f"_{name}", function)
        self._apply, self._accept, self._free = (llama[f"llama_sampler_{n}"] for n in ("apply", "accept", "free"))
        self._apply.restype = self._accept.restype = self._free.restype = None
        self._apply.argtypes = (c_void_p, POINTER(TokenDataArray))
        self._accept.argtypes, self._free.argtypes = (c_void_p, c_int32), (c_void_p,)

    @contextmanager
    def made(self, name: str, *arguments: object, history: Sequence[int] = ()) -> Iterator[int]:
        """A sampler that has accepted `history`."""
        handle = getattr(self, f"_{name}")(*arguments)
        try:
            for token in history:
                self._accept(handle, token)
            yield handle
        finally:
            self._free(handle)

    def run(
        self, logits: NDArray[np.float32], *chain: tuple[object, ...], history: Sequence[int] = ()
    ) -> dict[int, float]:
        """Token → logit of what `chain` ((name, arguments...), ...) leaves of all tokens, without banned ones."""
        n = len(logits)
        table = np.zeros(n, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        table["id"], table["logit"] = np.arange(n), logits
        array = TokenDataArray(table.ctypes.data_as(POINTER(TokenData)), n, -1, False)
        for name, *arguments in chain:
            with self.made(str(name), *arguments, history=history) as handle:
                self._apply(handle, byref(array))
        start = (ctypes.addressof(array.data.contents) - table.ctypes.data) // table.itemsize if array.size else 0
        kept = table[start : start + array.size]
        return {int(t): float(v) for t, v in zip(kept["id"], kept["logit"], strict=True) if v > -np.inf}
