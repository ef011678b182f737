"""The commands that make files: `convert`, `quantize`, `imatrix`. Knows flags and how results are shown, nothing else.

Imports stay light: each command loads what it needs when it runs. Invariant: the answer or one JSON document goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from .options import PlaceFlags, takes

if TYPE_CHECKING:
    from ..make.pipeline import Made

Threads = Annotated[int, typer.Option("-t", "--threads", min=0, help="CPU threads; 0: one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Chunk = Annotated[int, typer.Option("--chunk", min=32, help="Tokens read at once.")]
Chunks = Annotated[int, typer.Option("--chunks", min=0, help="Chunks of the text to use; 0: all of it.")]
_READING = (
    "n_gpu_layers", "vram", "ram", "threads", "threads_batch", "override_tensor", "n_cpu_moe", "device", "split_mode",
    "tensor_split", "main_gpu", "no_kv_offload", "mlock", "no_mmap", "rpc",
)  # fmt: skip
#: the flags of PlaceFlags that mean something where a text is read in chunks
ReadingFlags: Any = make_dataclass(
    "ReadingFlags",
    [
        (f.name, get_type_hints(PlaceFlags, include_extras=True)[f.name], field(default=f.default))
        for f in fields(PlaceFlags)
        if f.name in _READING
    ],
)


def register(app: typer.Typer) -> None:
    """Adds the commands to the program."""
    app.command()(convert)
    app.command()(quantize)
    app.command()(imatrix)


def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a Hugging Face model.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="GGUF file to write.")],
    type_name: Annotated[
        str, typer.Option("--type", help="f16, bf16, q8_0, f32, or auto: as the weights are.")
    ] = "auto",
    pre_tokenizer: Annotated[
        str, typer.Option("--pre-tokenizer", help="Use this pre-tokenizer of the engine instead of the one recognised.")
    ] = "",
    name: Annotated[str, typer.Option("--model-name", help="Name to put into the file.")] = "",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let Python code that lies in the folder run. It can do anything."),
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin. Only for folders you trust.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn a Hugging Face folder into a GGUF file."""
    from ..make.convert import ConvertOptions
    from ..make.convert import convert as run
    from ..units import format_size

    options = ConvertOptions(folder, output, type_name.lower(), pre_tokenizer, trust_remote_code, allow_pickle, name)
    with _Line() as line:
        done = run(options, lambda stage, at, of: line.show(stage, at, of))
    _warn(done.warnings)
    if as_json:
        tokens = {
            "compared": done.tokens.compared,
            "equal": done.tokens.equal,
            "difference": done.tokens.first_difference,
        }
        _print_json({
            "path": str(done.path), "bytes": done.bytes, "bpw": round(done.bpw, 4), "types": dict(done.types),
            "fallbacks": [], "sha256": done.sha256, "tokens": tokens, "pre_tokenizer": done.pre_tokenizer,
            "recipe": dict(done.recipe), "warnings": list(done.warnings),
        })  # fmt: skip
        return
    typer.echo(f"{done.path}: {format_size(done.bytes)}, {done.bpw:.2f} bits per weight, sha256 {done.sha256}")
    if done.tokens.compared and done.tokens.equal:
        typer.echo(f"tokenizer: the same as the folder's on {done.tokens.compared} tokens")


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="GGUF file (any part of a split one), alias, or Hugging Face folder.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="GGUF file to write.")],
    type_name: Annotated[
        str, typer.Argument(metavar="TYPE", help="Such as Q4_K_M; may be left out with --target-*.")
    ] = "",
    imatrix_file: Annotated[Path | None, typer.Option("--imatrix", help="Importance matrix.")] = None,
    tensor_type: Annotated[
        list[str] | None, typer.Option("--tensor-type", metavar="REGEX=TYPE", help="Type of the tensors that match.")
    ] = None,
    output_tensor_type: Annotated[
        str | None, typer.Option("--output-tensor-type", help="Type of output.weight.")
    ] = None,
    token_embedding_type: Annotated[
        str | None, typer.Option("--token-embedding-type", help="Type of the token embedding.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="One type for all tensors, no mix.")] = False,
    keep_split: Annotated[bool, typer.Option("--keep-split", help="Write as many parts as the input has.")] = False,
    target_bpw: Annotated[
        float | None, typer.Option("--target-bpw", help="Choose types per tensor for this many bits per weight.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option("--target-size", help="Choose types per tensor for this size, such as 4GiB.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forecast types, fallbacks and bytes; write nothing.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a tensor cannot have the type asked for.")
    ] = False,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Accept a source that is already quantized; quality drops.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure what was lost; needs --text.")] = False,
    text: Annotated[Path | None, typer.Option("--text", help="Text for --report and --target-*.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the report's picture (PNG) here.")] = None,
    chunk: Chunk = 512,
    chunks: Chunks = 0,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Make a GGUF file smaller, and say what it costs."""
    from ..make.pipeline import MakeOptions, make, plan
    from ..make.quantize import QuantizeOptions

    quantizing = QuantizeOptions(
        source=_source(model), target=output, type=type_name, imatrix=imatrix_file,
        tensor_types=_pairs(tensor_type or ()), output_tensor_type=output_tensor_type,
        token_embedding_type=token_embedding_type, pure=pure, keep_split=keep_split,
        allow_requantize=allow_requantize, strict=strict, threads=threads,
    )  # fmt: skip
    options = MakeOptions(
        quantize=quantizing, target_bpw=target_bpw, target_bytes=_size(target_size), report=report or plot is not None,
        text=text, plot=plot, chunk=chunk, most_chunks=chunks,
    )  # fmt: skip
    with _Line() as line:
        if dry_run:
            _show_forecast(plan(options, line.show), as_json)
            return
        made = make(options, line.show)
    _warn(made.warnings)
    _show_made(made, as_json)


@takes(place=ReadingFlags)
def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="GGUF file of the unquantized model, or an alias.")],
    text: Annotated[Path, typer.Option("-f", "--file", help="Text to read.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Importance matrix to write (GGUF).")],
    chunk: Chunk = 512,
    chunks: Chunks = 0,
    as_json: Json = False,
    place: Any = None,
) -> None:
    """Measure which weights matter, from a text."""
    from ..make.imatrix import ImatrixOptions
    from ..make.imatrix import imatrix as run
    from .arguments import endpoints_of, limits_of

    flags = PlaceFlags(**asdict(place))
    with _Line() as line:
        options = ImatrixOptions(_source(model), text, output, chunk, chunks, limits_of(flags), endpoints_of(flags.rpc))
        done = run(options, lambda at, of: line.show("reading", at, of))
    _warn(done.warnings)
    if as_json:
        _print_json({
            "path": str(done.path), "chunks": done.chunks, "resumed_chunks": done.resumed, "tokens": done.tokens,
            "entries": done.entries, "sha256": done.sha256, "text_sha256": done.text_sha256,
            "warnings": list(done.warnings),
        })  # fmt: skip
        return
    resumed = f", {done.resumed} of them from an interrupted run" if done.resumed else ""
    typer.echo(f"{done.path}: {done.entries} tensors, {done.tokens} tokens in {done.chunks} chunks{resumed}")


def _show_forecast(plans: Any, as_json: bool) -> None:
    from ..make.forecast import as_json as to_json
    from ..make.forecast import describe

    forecast, refusal = plans
    _warn(forecast.warnings)
    if as_json:
        _print_json({**to_json(forecast), "dry_run": True})
    else:
        for text in describe(forecast):
            typer.echo(text)
    if refusal is not None:
        raise refusal


def _show_made(made: Made, as_json: bool) -> None:
    from ..make.forecast import describe
    from ..make.pipeline import as_json as to_json
    from ..make.report import table

    if as_json:
        _print_json(to_json(made))
        return
    for text in describe(made.result.forecast):
        typer.echo(text)
    for path, digest in zip(made.result.paths, made.result.sha256, strict=True):
        typer.echo(f"{path}: sha256 {digest}")
    if made.report is not None:
        typer.echo(f"against {made.report.source}, {made.report.scored} positions of {made.report.text}:")
        for text in table(made.report.models):
            typer.echo(text)


def _source(text: str) -> Path:
    """The folder or file that MODEL stands for; an alias is fetched."""
    from ..models.registry import resolve

    if (path := resolve(text).path) is not None:
        return path
    from ..open import find_model  # loads what a run needs: 0.2 s

    return find_model(text)[0]


def _pairs(items: Iterable[str]) -> tuple[tuple[str, str], ...]:
    from ..errors import UsageError

    pairs = []
    for item in items:
        pattern, equals, kind = item.rpartition("=")
        if not equals or not pattern or not kind:
            raise UsageError(f"'{item}' is not REGEX=TYPE", "for example: --tensor-type 'ffn_down=Q6_K'")
        pairs.append((pattern, kind))
    return tuple(pairs)


def _size(text: str | None) -> int | None:
    from ..units import parse_size

    return None if text is None else parse_size(text)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, ensure_ascii=False))


class _Line:
    """One line of progress on stderr, redrawn; only on a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._shown = ""

    def show(self, stage: str, done: int, of: int) -> None:
        """Draws `stage` with its share of the work; `of` 0: without."""
        text = f"{stage} {100 * done // of} %" if of else stage
        if self._on and text != self._shown:
            self._shown = text
            sys.stderr.write(f"\r\x1b[2K{text[:100]}")
            sys.stderr.flush()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on and self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
