"""An importance matrix from a text: checks before work starts, the run in a child, publication. Resumable.

Knows no tensors. Invariant: the output name holds a whole matrix or what it held before; what is needed to go on after
an interruption lies beside it as `NAME.partial` and is removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine.jobs.digest import sha256_of
from ..errors import UsageError
from ..loader import prepare
from ..model_file.split import open_model_file
from ..plan import Limits
from .enough import check_text
from .job import run_job, stoppable
from .target import check_room, check_source, check_target, publish, remove, scratch_for, shown, sweep

Progress = Callable[[int, int], None]
_VALUE_BYTES = 20  # of the result, of what is saved on the way, and of the next such file before it replaces that
_SAVE_EVERY = 20.0  # seconds between saves; what an interruption costs at most


@dataclass(frozen=True, slots=True)
class ImatrixOptions:
    """`chunk`: tokens read at once; `most_chunks` 0: the whole text; `limits`: what the planner must keep to."""

    model: Path
    text: Path
    target: Path
    chunk: int = 512
    most_chunks: int = 0
    limits: Limits = field(default_factory=Limits)
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImatrixResult:
    """`resumed`: chunks taken over from an interrupted run; `entries`: weight tensors covered."""

    path: Path
    chunks: int
    resumed: int
    tokens: int
    entries: int
    sha256: str
    text_sha256: str
    warnings: tuple[str, ...]


def imatrix(options: ImatrixOptions, progress: Progress | None = None) -> ImatrixResult:
    """Writes the matrix. `progress(chunks done, of)`. Raises UsageError when there is too little text."""
    if options.chunk < 32:
        raise UsageError(f"a chunk of {options.chunk} tokens is too short", "512 is usual")
    with stoppable():
        check_source(options.model)
        check_source(options.text)
        if options.text.is_dir() or not options.text.stat().st_size:
            raise UsageError(f"{shown(options.text)} holds no text", "give a text file of some 100 KB or more")
        model = open_model_file(options.model)
        check_target(options.target, [*model.paths, options.text])
        check_room(options.target, _VALUE_BYTES * sum(_values(t.shape) for t in model.tensors))
        check_text(model, options.text, 2 * options.chunk)
        sweep(options.target)
        partial = options.target.with_name(options.target.name + ".partial")
        text_sha256 = sha256_of(options.text)
        facts = {"dataset": options.text.name, "text_sha256": text_sha256, "model_sha256": sha256_of(*model.paths)}
        return _run(options, model.path, partial, facts, progress)


def _values(shape: Sequence[int]) -> int:
    """Entries of a matrix for a weight tensor, at most."""
    return shape[0] * (shape[2] if len(shape) > 2 else 1) if len(shape) > 1 else 0


def _run(
    options: ImatrixOptions, model: Path, partial: Path, facts: Mapping[str, str], progress: Progress | None
) -> ImatrixResult:
    scratch = scratch_for(options.target)
    chunk = options.chunk
    limits = replace(options.limits, n_ctx=chunk, n_batch=chunk, n_ubatch=chunk, n_outputs=chunk, goal="prompt")
    prepared = prepare(model, limits, rpc=options.rpc)
    weights, context = prepared.plan.model, prepared.plan.context
    job: dict[str, Any] = {
        "model": str(model),
        "text": str(options.text),
        "scratch": str(scratch),
        "partial": str(partial),
        "chunk": options.chunk,
        "most_chunks": options.most_chunks,
        "save_every": _SAVE_EVERY,
        "threads": context.threads_batch,
        "settings": {"model": asdict(weights), "context": asdict(context)},
        "rpc": options.rpc,
        "facts": dict(facts),
    }

    def tell(event: Mapping[str, Any]) -> None:
        if progress is not None:
            progress(event["done"], event["of"])

    try:
        done = run_job("imatrix", job, tell, [scratch])
        digest = sha256_of(scratch)
        publish(scratch, options.target)
    finally:
        remove(scratch)
    for path in (partial, partial.with_name(partial.name + ".new")):
        path.unlink(missing_ok=True)
    return ImatrixResult(
        options.target, done["chunks"], done["resumed"], done["tokens"], done["entries"], digest, facts["text_sha256"],
        prepared.plan.warnings + _warnings(done),
    )  # fmt: skip


def _warnings(done: Mapping[str, Any]) -> tuple[str, ...]:
    told = []
    if done["spoiled"]:
        told.append("what an interrupted run had saved is damaged: all was read again")
    if names := done["partial_data"]:
        told.append(
            f"{len(names)} entries have experts that no token of the text visited, such as {names[0]}: give more text"
        )
    return tuple(told)
