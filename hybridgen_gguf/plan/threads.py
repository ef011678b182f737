"""How many threads decode and prefill get: all usable ones, or fewer where a profile says that fewer are faster. Pure.

Invariant: what the user set is kept.
"""

from __future__ import annotations

from ..machine.rates import CPU
from ..settings import ContextSettings
from .cost import CostModel, Use
from .inputs import Given, Notes


def choose_threads(given: Given, notes: Notes) -> tuple[int, int]:
    """Threads for decode and for prefill: all usable ones, unless fewer were measured to be clearly faster."""
    limits, cpu = given.limits, given.hardware.cpu
    usable = cpu.usable_threads
    chosen = []
    for name, fixed, prefill in (("threads", limits.threads, False), ("threads_batch", limits.threads_batch, True)):
        count, why = fixed or usable, "set by the user" if fixed else cpu.threads_reason
        if fixed is None and prefill and limits.threads:
            count, why = limits.threads, "as for decode"
        elif fixed is None and given.rates.measured:
            best = _fastest_threads(given, usable, prefill=prefill)
            if best != usable:
                count, why = best, f"predicted to be faster than {usable}, from this machine's profile"
        notes.because(name, count, why)
        chosen.append(count)
        if fixed and fixed > usable and not prefill:
            notes.warnings.append(f"{fixed} threads on {usable} usable cores will be slower than {usable}")
    return chosen[0], chosen[1]


def _fastest_threads(given: Given, usable: int, *, prefill: bool) -> int:
    def seconds(threads: int) -> float:
        limits = given.limits
        context = ContextSettings(
            4096, type_k=limits.type_k, type_v=limits.type_v, threads=threads, threads_batch=threads
        )
        model = CostModel(given.rates, given.work, Use(2048, context))
        return sum(c.mixer + c.cache + c.heavy for c in (model.prefill(CPU) if prefill else model.decode(CPU)))

    counts = sorted({min(count, usable) for count in given.rates.thread_counts()} | {usable})
    best = min(counts, key=seconds)
    return best if seconds(best) < 0.95 * seconds(usable) else usable
