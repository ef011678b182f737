"""The largest logits of a decode, found on the device that computed them, so that only they cross the bus.

Attaches the engine's `hg-top` sampler (include/hg-sample.h) to one sequence of an open context. Knows no options and no
draw. Needs our engine. Invariant: the context lets go of the sampler before the sampler is freed.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import EngineError
from .abi.llama import ChainParams


class DeviceSample(Closing):
    """`count` largest logits of sequence `sequence` after each decode. Raises EngineError when the engine cannot.

    `llama`: `library.Library.llama`; `context`: the llama_context's handle. While attached, `llama_get_logits` of that
    sequence is stale; use `read`, or `fetch` for all logits. `probabilities`: also find the log-sum-exp of all logits,
    for log-probabilities.
    """

    def __init__(
        self,
        llama: ctypes.CDLL,
        context: Any,
        *,
        n_vocab: int,
        count: int,
        probabilities: bool = False,
        sequence: int = 0,
    ) -> None:
        if not hasattr(llama, "hg_sampler_init_top"):
            raise EngineError("this engine has no device sampler", "build ours: scripts/build_engine")
        self._llama = llama
        self._context, self._sequence, self._n_vocab = context, sequence, n_vocab
        self._all = np.empty(n_vocab, np.float32)
        self._chain = self._llama.llama_sampler_chain_init(ChainParams(True))
        self._llama.llama_sampler_chain_add(self._chain, self._llama.hg_sampler_init_top(count, probabilities))
        if not self._llama.llama_set_sampler(context, sequence, self._chain):
            self._llama.llama_sampler_free(self._chain)
            self._chain = None
            raise EngineError("the device cannot sample", "tensor splitting (-sm tensor) has no device sampler")

    def read(self, output: int = -1) -> tuple[NDArray[np.int64], NDArray[np.float32], float | None]:
        """Ids and logits in no order, and the log-sum-exp of all logits or None. `output`: as llama_get_logits_ith."""
        count = self._llama.llama_get_sampled_logits_count_ith(self._context, output)
        logits = self._llama.llama_get_sampled_logits_ith(self._context, output)
        if not count or not logits:
            raise EngineError("the device gave no logits: the last token read asked for none")
        ids = self._llama.llama_get_sampled_candidates_ith(self._context, output)
        values = np.ctypeslib.as_array(logits, shape=(count,)).copy()
        tokens = np.ctypeslib.as_array(ids, shape=(count,)).astype(np.int64)
        probabilities = self._llama.llama_get_sampled_probs_ith(self._context, output)
        if not probabilities:
            return tokens, values, None
        best = int(values.argmax())
        share = float(probabilities[best])
        return tokens, values, float(values[best]) - math.log(share) if share > 0 else math.nan

    def fetch(self, output: int = -1) -> NDArray[np.float32]:
        """All logits of an output of the last decode, from the device; a view that is valid until the next `fetch`."""
        if not self._llama.hg_sample_fetch_logits(self._context, output, self._all.ctypes.data):
            raise EngineError("the logits are no longer on the device")
        return self._all

    def close(self) -> None:
        """Detaches; the context gives all logits again from the next decode on."""
        if self._chain:
            self._llama.llama_set_sampler(self._context, self._sequence, None)
            self._llama.llama_sampler_free(self._chain)
            self._chain = None
