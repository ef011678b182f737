"""What quantizing cost: a model against its source on a named text, as numbers, a table, JSON or a picture.

The numbers come from `engine/compare.py` in a child. Invariant: every figure names the text by its hash and says how
many tokens were scored.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.jobs.digest import sha256_of
from ..errors import Failed, UsageError
from ..model_file.split import ModelFile, open_model_file
from ..units import format_size
from .job import run_job, stoppable
from .target import check_source, publish, remove, scratch_for, shown

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """`chunk` in tokens; `most_chunks` 0: the whole text; `threads` 0: one per core."""

    source: Path
    models: tuple[Path, ...]
    text: Path
    chunk: int = 512
    most_chunks: int = 0
    threads: int = 0
    speed: bool = True


@dataclass(frozen=True, slots=True)
class Quality:
    """A model against its source. Divergences: nats a token; `top1`: 0 to 1; speeds: tokens/s, 0 when not measured."""

    name: str
    bytes: int
    bpw: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_99: float
    ppl: float
    ppl_base: float
    ppl_ratio: float
    ppl_ratio_error: float
    top1: float
    top1_error: float
    prompt_tps: float
    prompt_tps_base: float
    decode_tps: float
    decode_tps_base: float


@dataclass(frozen=True, slots=True)
class Report:
    """`scored`: positions compared; `tokens`: read."""

    source: str
    text: str
    text_sha256: str
    chunk: int
    tokens: int
    scored: int
    models: tuple[Quality, ...]


def report(options: ReportOptions, progress: Progress | None = None) -> Report:
    """Compares. Raises UsageError for too little text or different vocabularies, NotFound, BadFile, EngineError."""
    if options.chunk < 32:
        raise UsageError(f"a chunk of {options.chunk} tokens is too short", "512 is usual")
    for path in (options.source, *options.models, options.text):
        check_source(path)
    source, files = open_model_file(options.source), [open_model_file(path) for path in options.models]
    job = {
        "base": str(source.path),
        "models": [str(file.path) for file in files],
        "text": str(options.text),
        "chunk": options.chunk,
        "most_chunks": options.most_chunks,
        "threads": options.threads or len(os.sched_getaffinity(0)),
        "speed": options.speed,
        "kept": "",
    }

    def tell(event: Mapping[str, Any]) -> None:
        if progress is not None:
            progress(event["done"], event["of"])

    with stoppable():
        found = run_job("compare", job, tell)
    qualities = tuple(_quality(file, result) for file, result in zip(files, found["models"], strict=True))
    scored = int(found["models"][0]["scored"]) if found["models"] else 0
    return Report(
        source=options.source.name,
        text=options.text.name,
        text_sha256=sha256_of(options.text),
        chunk=options.chunk,
        tokens=found["tokens"],
        scored=scored,
        models=qualities,
    )


def _quality(file: ModelFile, result: Mapping[str, float]) -> Quality:
    weights = sum(tensor.parameters for tensor in file.tensors)
    figures = {"decode_tps": 0.0, "decode_tps_base": 0.0, **result}
    figures.pop("scored")
    return Quality(file.path.name, file.bytes, sum(t.bytes for t in file.tensors) * 8 / weights, **figures)


def as_json(done: Report) -> dict[str, Any]:
    """The report in the form that `--json` prints; `quality` is the first model's summary."""
    first = done.models[0]
    summary = {"kld": first.kld_mean, "ppl_ratio": first.ppl_ratio, "top1": first.top1}
    return {**asdict(done), "models": [asdict(model) for model in done.models], "quality": summary}


def table(models: Sequence[Quality]) -> list[str]:
    """A Markdown table, one row a model."""
    lines = [
        "| model | size | bits/weight | KLD mean | median | 99 % | perplexity ratio | same top token | prompt t/s "
        "| decode t/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines.extend(_row(q) for q in models)
    return lines


def _row(q: Quality) -> str:
    cells = (
        q.name,
        format_size(q.bytes),
        f"{q.bpw:.2f}",
        f"{q.kld_mean:.5f} ± {q.kld_error:.5f}",
        f"{q.kld_median:.5f}",
        f"{q.kld_99:.4f}",
        f"{q.ppl_ratio:.4f} ± {q.ppl_ratio_error:.4f}",
        f"{q.top1:.2%}",
        _speed(q.prompt_tps, q.prompt_tps_base),
        _speed(q.decode_tps, q.decode_tps_base),
    )
    return "| " + " | ".join(cells) + " |"


def _speed(mine: float, base: float) -> str:
    return f"{mine:.0f} (source {base:.0f})" if mine else "not measured"


def plot(models: Sequence[Quality], target: Path) -> Path:
    """A picture: divergence against bits per weight. Raises Failed when matplotlib is not installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise Failed("--plot needs matplotlib", "install it: pip install 'hybridgen-gguf[plot]'") from None
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight")
    axes.set_ylabel("KL divergence, nats a token (dot: mean, bar: to 99 %)")
    axes.margins(x=0.15)
    for q in models:
        low = max(q.kld_mean, 1e-7)
        axes.plot([q.bpw, q.bpw], [low, max(q.kld_99, low)], color="0.7", linewidth=1)
        axes.plot([q.bpw], [low], "o", color="C0")
        axes.annotate(q.name.removesuffix(".gguf"), (q.bpw, low), textcoords="offset points", xytext=(5, 3), fontsize=8)
    scratch = scratch_for(target)
    try:
        figure.savefig(scratch, format="png", dpi=120, metadata={"Software": None})
        publish(scratch, target)
    except OSError as error:
        raise Failed(f"{shown(target)} cannot be written: {error.strerror}") from None
    finally:
        remove(scratch)
    return target
