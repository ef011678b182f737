"""The reasons of a plan's bytes, locks and predictions, in words. Pure.

Invariant: notes are added to, nothing else is changed.
"""

from __future__ import annotations

from ..machine.rates import CPU
from ..units import format_size
from .inputs import Given, Notes
from .types import MemoryUse, Predicted


def explain_memory(used: tuple[MemoryUse, ...], notes: Notes) -> None:
    for use in (use for use in used if use.total):
        parts = f"weights {format_size(use.weights)}, KV {format_size(use.kv)}, scratch {format_size(use.compute)}"
        notes.because(f"memory {use.device}", format_size(use.total), f"{parts}; counted by the engine's allocator")


def explain_lock(given: Given, used: tuple[MemoryUse, ...], notes: Notes) -> None:
    """Weights that --mlock cannot lock stay evictable: the engine goes on without a word."""
    allowed = given.hardware.memory.memlock
    wanted = sum(use.weights for use in used if use.device == CPU)
    if not given.limits.placement.use_mlock:
        return
    if allowed is None or allowed >= wanted:
        notes.because("mlock", format_size(wanted), "set by the user; this process may lock so much")
        return
    why = f"{format_size(wanted)} of weights, and this process may lock {format_size(allowed)}"
    notes.because("mlock", "fails in part", why)
    notes.warnings.append(
        f"--mlock locks only a part: {why}; `ulimit -l unlimited` raises that, or a container's limit"
    )


def explain_prediction(predicted: Predicted | None, notes: Notes) -> None:
    if predicted is None:
        notes.because("predicted", "unknown", "this machine was not measured: run `hgguf profile`")
        return
    at = f"at {predicted.depth} tokens of context, from this machine's profile"
    notes.because("predicted", f"{predicted.decode_tps:.1f} tokens/s decode", at)
    notes.because("predicted", f"{predicted.prompt_tps:.1f} tokens/s prefill", at)
