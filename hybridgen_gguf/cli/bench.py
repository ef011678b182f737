"""`hgguf bench attention`: the CPU attention kernel alone, stock and fast code alternating.

Invariant: heavy imports happen inside the verb.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import show
from .options import AttentionBenchFlags

if TYPE_CHECKING:
    from ..bench.attention import AttentionRecord


def attention_verb(flags: AttentionBenchFlags) -> None:
    """`hgguf bench attention`."""
    from ..bench.attention import AttentionOptions, run_attention_bench
    from ..machine.probe import read_hardware

    try:
        lengths = tuple(int(part) for part in flags.cells.split(","))
    except ValueError:
        raise UsageError(f"--cells {flags.cells} is not a list of numbers", "for example --cells 2048,8192") from None
    records = run_attention_bench(
        AttentionOptions(
            types=tuple(flags.types.split(",")),
            cells=lengths,
            heads=flags.heads,
            kv_heads=flags.kv_heads,
            head_size=flags.head_size,
            threads=flags.threads or read_hardware().cpu.usable_threads,
            tokens=flags.tokens,
            repeats=flags.repetitions,
        )
    )
    if flags.json:
        show.data([asdict(record) for record in records])
        return
    columns = ("K/V", "cells", "ms", "GB/s", "of read", "GFLOP/s", "error", "stock ms", "stock error", "ratio")
    show.table("", columns, [_row(record) for record in records], right=tuple(range(1, 10)))


def _row(r: AttentionRecord) -> tuple[object, ...]:
    ours = (f"{r.ms:.3f}", f"{r.gb_s:.1f}", f"{r.fraction_of_read:.0%}", f"{r.gflops:.1f}", f"{r.error:.1e}")
    stock = (f"{r.stock_ms:.3f}", f"{r.stock_error:.1e}", f"{r.ratio:.2f}")
    return (f"{r.type_k}/{r.type_v}", r.cells, *ours, *stock)
