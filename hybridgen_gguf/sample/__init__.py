"""Logits → token: llama.cpp's chain of steps, then an exact and reproducible Gumbel draw.

sampler   the chain and the draw; start here
options   what can be set
steps     the steps of the chain (top-k, top-p, min-p and so on)
edits     biases and penalties on single logits; dry: the DRY penalty
types     what goes in and comes out
device    candidates found on the device instead of all logits
logits    the largest logits and log-sum-exp
masked    only the logits that a constraint allows
noise     Gumbel noise keyed by seed, stream, position and token
portable  the same floating-point results on every machine
"""

from .options import SampleOptions
from .sampler import Sampler
from .types import Draw

__all__ = ["Draw", "SampleOptions", "Sampler"]
