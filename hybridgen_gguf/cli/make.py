"""The verbs that make files: convert, quantize, imatrix. Knows flags and how results are shown, nothing else.

Imports stay light: each verb loads what it needs when it runs. Invariant: the answer or one JSON document goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import show
from .options import ConvertFlags, ImatrixFlags, PlaceFlags, QuantizeFlags, ReportFlags

if TYPE_CHECKING:
    from ..make.convert import ConvertResult
    from ..make.pipeline import Made, MakeOptions


def convert_verb(flags: ConvertFlags) -> None:
    """`hgguf convert`."""
    from ..make.convert import ConvertOptions, convert
    from ..units import format_size

    options = ConvertOptions(
        flags.folder, flags.output, flags.type_name.lower(), flags.pre_tokenizer, flags.trust_remote_code,
        flags.allow_pickle, flags.name,
    )  # fmt: skip
    with show.stages("converting") as say:
        done = convert(options, say)
    _warn(done.warnings)
    if flags.json:
        show.data(_converted(done))
        return
    show.answer(f"{done.path}: {format_size(done.bytes)}, {done.bpw:.2f} bits per weight, sha256 {done.sha256}\n")
    if done.tokens.compared and done.tokens.equal:
        show.answer(f"tokenizer: the same as the folder's on {done.tokens.compared} tokens\n")


def _converted(done: ConvertResult) -> dict[str, Any]:
    tokens = {
        "compared": done.tokens.compared,
        "equal": done.tokens.equal,
        "difference": done.tokens.first_difference,
    }
    return {
        "path": str(done.path), "bytes": done.bytes, "bpw": round(done.bpw, 4), "types": dict(done.types),
        "fallbacks": [], "sha256": done.sha256, "tokens": tokens, "pre_tokenizer": done.pre_tokenizer,
        "recipe": dict(done.recipe), "warnings": list(done.warnings),
    }  # fmt: skip


def quantize_verb(flags: QuantizeFlags, report: ReportFlags) -> None:
    """`hgguf quantize`."""
    from ..make.pipeline import make, plan

    options = _make_options(flags, report)
    with show.stages("quantizing") as say:
        if flags.dry_run:
            forecast, refusal = plan(options, say)
        else:
            made = make(options, say)
    if flags.dry_run:
        _show_forecast(forecast, refusal, flags.json)
        return
    _warn(made.warnings)
    _show_made(made, flags.json)


def _make_options(flags: QuantizeFlags, report: ReportFlags) -> MakeOptions:
    from ..make.pipeline import MakeOptions
    from ..make.quantize import QuantizeOptions

    quantizing = QuantizeOptions(
        source=_source(flags.model), target=flags.output, type=flags.type_name, imatrix=flags.imatrix,
        tensor_types=_pairs(flags.tensor_type or ()), output_tensor_type=flags.output_tensor_type,
        token_embedding_type=flags.token_embedding_type, pure=flags.pure, keep_split=flags.keep_split,
        allow_requantize=flags.allow_requantize, strict=flags.strict, threads=flags.threads,
    )  # fmt: skip
    return MakeOptions(
        quantize=quantizing, target_bpw=flags.target_bpw, target_bytes=_size(flags.target_size),
        report=report.report or report.plot is not None, text=report.text, plot=report.plot, chunk=report.chunk,
        most_chunks=report.chunks,
    )  # fmt: skip


def imatrix_verb(flags: ImatrixFlags, place: Any) -> None:
    """`hgguf imatrix`. `place`: the flags of PlaceFlags that mean something here."""
    from ..make.imatrix import ImatrixOptions, imatrix
    from .arguments import endpoints_of, limits_of

    all_flags = PlaceFlags(**asdict(place))
    with show.stages("importance matrix") as say:
        options = ImatrixOptions(
            _source(flags.model), flags.text, flags.output, flags.chunk, flags.chunks, limits_of(all_flags),
            endpoints_of(all_flags.rpc),
        )  # fmt: skip
        done = imatrix(options, lambda at, of: say("reading", at, of))
    _warn(done.warnings)
    if flags.json:
        show.data({
            "path": str(done.path), "chunks": done.chunks, "resumed_chunks": done.resumed, "tokens": done.tokens,
            "entries": done.entries, "sha256": done.sha256, "text_sha256": done.text_sha256,
            "warnings": list(done.warnings),
        })  # fmt: skip
        return
    resumed = f", {done.resumed} of them from an interrupted run" if done.resumed else ""
    show.answer(f"{done.path}: {done.entries} tensors, {done.tokens} tokens in {done.chunks} chunks{resumed}\n")


def _show_forecast(forecast: Any, refusal: Exception | None, as_json: bool) -> None:
    from ..make.forecast import as_json as to_json
    from ..make.forecast import describe

    _warn(forecast.warnings)
    if as_json:
        show.data({**to_json(forecast), "dry_run": True})
    else:
        for text in describe(forecast):
            show.answer(f"{text}\n")
    if refusal is not None:
        raise refusal


def _show_made(made: Made, as_json: bool) -> None:
    from ..make.forecast import describe
    from ..make.pipeline import as_json as to_json
    from ..make.report import table

    if as_json:
        show.data(to_json(made))
        return
    for text in describe(made.result.forecast):
        show.answer(f"{text}\n")
    for path, digest in zip(made.result.paths, made.result.sha256, strict=True):
        show.answer(f"{path}: sha256 {digest}\n")
    if made.report is not None:
        show.answer(f"against {made.report.source}, {made.report.scored} positions of {made.report.text}:\n")
        for text in table(made.report.models):
            show.answer(f"{text}\n")


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
    for text in warnings:
        show.warning(text)
