"""`hgguf bench attention`: the CPU attention kernel alone, stock and fast code alternating.

Invariant: heavy imports happen inside the command. `bench attention` is one verb of two words, because `bench` itself
takes a model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from . import show
from .options import JsonFlag

if TYPE_CHECKING:
    from ..bench.attention import AttentionRecord

NAME = "bench attention"


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(NAME)(bench_attention)


def merge_words(arguments: list[str]) -> list[str]:
    """`bench attention ...` as the one word that typer knows the command by."""
    return [NAME, *arguments[2:]] if arguments[:2] == NAME.split() else list(arguments)


def bench_attention(
    types: Annotated[
        str, typer.Option("--types", help="KV types, separated by commas; K/V for unequal ones.")
    ] = "f16,q8_0,q4_0",
    cells: Annotated[str, typer.Option("--cells", help="Cells in the cache, separated by commas.")] = "2048,8192,32768",
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="Heads of K and V.")] = 8,
    head_size: Annotated[int, typer.Option("--head-size", help="Values in a head.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", help="Query tokens: 1 is writing, many is reading.")] = 1,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="Threads; none: the usable cores.")] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Repetitions; medians are shown.")] = 5,
    json: JsonFlag = False,
) -> None:
    """Measure CPU attention alone: time, bandwidth, error against float64; stock code beside ours."""
    from ..bench.attention import AttentionOptions, run_attention_bench
    from ..machine.probe import read_hardware

    try:
        lengths = tuple(int(part) for part in cells.split(","))
    except ValueError:
        raise UsageError(f"--cells {cells} is not a list of numbers", "for example --cells 2048,8192") from None
    records = run_attention_bench(
        AttentionOptions(
            types=tuple(types.split(",")),
            cells=lengths,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            threads=threads or read_hardware().cpu.usable_threads,
            tokens=tokens,
            repeats=repetitions,
        )
    )
    if json:
        show.data([asdict(record) for record in records])
        return
    columns = ("K/V", "cells", "ms", "GB/s", "of read", "GFLOP/s", "error", "stock ms", "stock error", "ratio")
    show.table("", columns, [_row(record) for record in records], right=tuple(range(1, 10)))


def _row(r: AttentionRecord) -> tuple[object, ...]:
    ours = (f"{r.ms:.3f}", f"{r.gb_s:.1f}", f"{r.fraction_of_read:.0%}", f"{r.gflops:.1f}", f"{r.error:.1e}")
    stock = (f"{r.stock_ms:.3f}", f"{r.stock_error:.1e}", f"{r.ratio:.2f}")
    return (f"{r.type_k}/{r.type_v}", r.cells, *ours, *stock)
