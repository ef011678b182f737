"""What a device must send of its logits so that the draw is the same as from all of them. Pure; knows no interface.

Invariant: a token that stays on the device has a logit of at most the smallest one sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .options import SampleOptions

_MOST_WANTED = 1024
_MOST_CANDIDATES = 4096


@dataclass(frozen=True)
class DeviceCandidates:
    """What crossed the bus: the largest logits of a vocabulary with their ids, in any order.

    Every token left behind has a logit of at most the smallest here. `lse`: log-sum-exp of all logits, None if unknown.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    lse: float | None = None


def device_candidates(options: SampleOptions, n_vocab: int) -> int | None:
    """How many of the largest logits a device must send so that `draw_candidates` settles it; None: send all.

    One more than top-k for ties at its edge, and one for each token that bias, penalties or DRY may push down past it.
    A step that can raise a logit, or one that needs the whole vocabulary, asks for all.
    """
    active = options.active_steps()
    raises = options.repeat_penalty < 1 or min(options.frequency_penalty, options.presence_penalty) < 0
    if ("penalties" in active and raises) or any(bias > 0 for _, bias in options.logit_bias):
        return None
    early = [name for name in ("penalties", "dry") if name in active]
    if active[: len(early)] != tuple(early):
        return None
    windows = {"penalties": options.repeat_last_n, "dry": options.dry_penalty_last_n}
    if any(windows[name] < 0 for name in early):
        return None
    touched = len(options.logit_bias) + sum(windows[name] for name in early)
    chain = active[len(early) :]
    if chain[:1] == ("top_k",):
        wanted = options.top_k
    elif (
        set(chain) <= {"temperature"}
        and not options.dynatemp_range
        and not touched
        and not options.logprobs
        and not options.draws
    ):
        wanted = 1 if options.temperature <= 0 and chain else _MOST_WANTED - 1
    else:
        return None
    count = max(wanted, options.logprobs) + touched + 1
    return min(count, n_vocab) if wanted <= _MOST_WANTED and count <= _MOST_CANDIDATES else None
