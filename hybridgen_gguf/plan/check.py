"""Settings that make no sense or cannot go together, named before anything is loaded. Pure.

Invariant: what passes here is within the engine's own limits.
"""

from __future__ import annotations

from ..errors import UsageError
from ..model_file.shape import ModelShape
from ..model_file.types import ggml_type
from ..settings import CELL_STEP, ROPE_SCALING, Rope
from .types import GOALS, Limits

_LARGEST_ROPE = 1e9  # beyond, float32 holds no positions
MOST_PARALLEL = 64  # requests at once; the engine has 256 sequences, and ended requests keep some of them
_MOST_TOKENS, _MOST_BATCH, _MOST_THREADS = (1 << 31) - CELL_STEP, 1 << 20, 1024  # the engine's counts are 32 bits


def check_limits(shape: ModelShape, limits: Limits) -> None:
    """Raises UsageError for the first setting that cannot be."""
    _check_counts(limits)
    _check_rope(limits.rope)
    if limits.depth is not None and limits.depth < 0:
        raise UsageError(f"--depth {limits.depth} is out of range", "give the tokens expected in the context")
    if limits.goal not in GOALS:
        raise UsageError(f"--goal {limits.goal} is not known", f"one of: {', '.join(GOALS)}")
    if limits.flash_attention == "off" and ggml_type(limits.type_v).block > 1:
        raise UsageError(
            f"-ctv {limits.type_v} needs flash attention, and -fa off turns it off",
            "leave out -fa off, or use -ctv f16",
        )
    for flag, type_name, head in _head_sizes(shape, limits):
        block = ggml_type(type_name).block
        if head % block:
            raise UsageError(
                f"{flag} {type_name} stores blocks of {block} values, and this model's heads have {head}",
                f"use {flag} f16",
            )


def _check_rope(rope: Rope) -> None:
    if rope.scaling is not None and rope.scaling not in ROPE_SCALING:
        raise UsageError(f"--rope-scaling {rope.scaling} is not known", f"one of: {', '.join(ROPE_SCALING)}")
    above, least = ("freq_base", "freq_scale"), ("orig_ctx", "ext_factor", "attn_factor", "beta_slow", "beta_fast")
    for name in (*above, *least):
        value = getattr(rope, name)
        flag = f"--{'rope' if name in above else 'yarn'}-{name.replace('_', '-')}"
        if value is not None and (not 0 <= value <= _LARGEST_ROPE or (name in above and value < 1 / _LARGEST_ROPE)):
            raise UsageError(
                f"{flag} {value:g} is out of range", f"give {'more than 0' if name in above else '0 or more'}"
            )


def _check_counts(limits: Limits) -> None:
    counts = (("-c", limits.n_ctx, _MOST_TOKENS), ("-b", limits.n_batch, _MOST_BATCH),
              ("-ub", limits.n_ubatch, _MOST_BATCH), ("--ram", limits.ram, None),
              ("--parallel", limits.parallel, MOST_PARALLEL),
              ("-t", limits.threads, _MOST_THREADS), ("-tb", limits.threads_batch, _MOST_THREADS))  # fmt: skip
    for flag, value, most in counts:
        if value is not None and (value < 1 or (most is not None and value > most)):
            raise UsageError(f"{flag} {value} is out of range", f"give {f'1 to {most}' if most else 'more than 0'}")
    if limits.vram is not None and limits.vram < 0:
        raise UsageError(f"--vram {limits.vram} is out of range", "give a size, or 0 for the CPU alone")


def _head_sizes(shape: ModelShape, limits: Limits) -> list[tuple[str, str, int]]:
    sizes = {("-ctk", limits.type_k, layer.head_k) for layer in shape.layers if layer.n_head_kv}
    return sorted(sizes | {("-ctv", limits.type_v, layer.head_v) for layer in shape.layers if layer.n_head_kv})
