"""From a folder or a GGUF file to a quantized file with its report, in one call.

Knows the order: convert when the source is a folder, choose types when a size is asked for, quantize, report.
Invariant: files on the way lie beside the target under scratch names and are gone at the end, however it comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.jobs.imatrix_file import read_summary
from ..errors import HgError, UsageError
from ..model_file.split import open_model_file
from ..model_file.types import padded
from . import recipe
from .enough import check_logits_room, check_text
from .file_types import file_type, least_bits
from .forecast import Forecast, mix_needs_imatrix
from .forecast import as_json as forecast_json
from .job import stoppable
from .quantize import QuantizeOptions, QuantizeResult, forecast, job_options, quantize, refuse
from .report import Report, ReportOptions, plot, report
from .report import as_json as report_json
from .sensitivity import Measurement, choose, measure
from .target import check_source, check_target, starts_again, work_folder

Progress = Callable[[str, int, int], None]
_MEASURED_CHUNKS = 4
#: the mix whose name a file with chosen types carries: the nearest one in bits per weight
_NEAREST = ((2.8, "Q2_K"), (3.6, "Q3_K_M"), (4.6, "Q4_K_S"), (5.2, "Q4_K_M"), (6.1, "Q5_K_M"), (7.5, "Q6_K"))


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """`target_bpw`, `target_bytes`: choose types per tensor; `text`: for that and for the report.

    `measured`: from an earlier call on the same source, matrix and text, so that only the choice is made again.
    """

    quantize: QuantizeOptions
    target_bpw: float | None = None
    target_bytes: int | None = None
    report: bool = False
    text: Path | None = None
    plot: Path | None = None
    chunk: int = 512
    most_chunks: int = 0
    measured: Measurement | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """The quantized file and what it cost; `report` None when it was not asked for."""

    result: QuantizeResult
    report: Report | None
    warnings: tuple[str, ...]
    measured: Measurement | None = None


def make(options: MakeOptions, progress: Progress) -> Made:
    """Writes the quantized file, its manifest, and the report when asked for. Raises what its steps raise."""
    _check(options)
    _check_target(options)
    again = starts_again(options.quantize.target)
    with stoppable(), work_folder(options.quantize.target) as work:
        quantizing, warnings = _as_gguf(options.quantize, work, progress)
        _check_text(options, quantizing.source)
        quantizing, measured = _with_chosen_types(options, quantizing, work, progress)
        result = quantize(quantizing, lambda _name, done, of: progress("quantizing", done, of))
        found = _report(options, quantizing.source, result, progress) if options.report else None
    return Made(result, found, again + warnings + result.warnings, measured)


def plan(options: MakeOptions, progress: Progress) -> tuple[Forecast, HgError | None]:
    """The forecast, and the error with which `make` would refuse to begin."""
    _check(options)
    with stoppable(), work_folder(options.quantize.target) as work:
        quantizing, _warnings = _as_gguf(options.quantize, work, progress)
        quantizing, _measured = _with_chosen_types(options, quantizing, work, progress)
        found = forecast(quantizing)
        try:
            refuse(quantizing, found)
        except HgError as error:
            return found, error
    return found, None


def as_json(made: Made) -> dict[str, Any]:
    """The result in the form that `--json` prints."""
    paths, hashes = [str(path) for path in made.result.paths], list(made.result.sha256)
    content = {
        **forecast_json(made.result.forecast),
        "paths": paths,
        "sha256": hashes[0] if len(hashes) == 1 else hashes,
        "manifest": str(made.result.manifest),
        "recipe": dict(made.result.recipe),
        "warnings": list(made.warnings),
    }
    if made.report is not None:
        content |= {"quality": report_json(made.report)["quality"], "report": asdict(made.report)}
    return content


def _check(options: MakeOptions) -> None:
    targets = options.target_bpw is not None or options.target_bytes is not None
    if options.target_bpw is not None and options.target_bytes is not None:
        raise UsageError("--target-bpw and --target-size were both given", "choose one")
    if options.target_bpw is not None and not 1 <= options.target_bpw <= 32:
        raise UsageError(f"--target-bpw {options.target_bpw:g} is out of range", "between 2 and 16 is usual")
    if targets and (options.quantize.tensor_types or options.quantize.pure):
        raise UsageError("--target-* chooses the types itself; --tensor-type and --pure cannot go with it", "drop one")
    if not options.quantize.type and not targets:
        raise UsageError("no TYPE was given", "such as Q4_K_M, or a size with --target-bpw or --target-size")
    if (targets or options.report) and options.text is None:
        raise UsageError("--report and --target-* measure on a text, and none was given", "add --text FILE")
    _check_before_converting(options.quantize)
    for path in (options.quantize.source, *([options.text] if options.text else [])):
        check_source(path)
    if options.plot is not None:
        check_target(
            options.plot, [options.quantize.source, options.quantize.target, *([options.text] if options.text else [])]
        )


def _check_text(options: MakeOptions, source: Path) -> None:
    """What is read at the end must be enough, and what is kept meanwhile must fit, before the work begins."""
    if options.text is None:
        return
    model = open_model_file(source)
    rate = check_text(model, options.text, options.chunk)
    if options.report:
        check_logits_room(model, options.text, rate, options.chunk, options.most_chunks)


def _check_before_converting(options: QuantizeOptions) -> None:
    """What `quantize` would refuse after the minutes of a conversion."""
    mix = file_type(options.type) if options.type else ""
    if options.imatrix is None and mix_needs_imatrix(mix):
        raise UsageError(f"{mix} needs an importance matrix", "make one with hgguf imatrix and pass it with --imatrix")
    if options.imatrix is not None:
        check_source(options.imatrix)
        read_summary(options.imatrix)


def _as_gguf(options: QuantizeOptions, work: Path, progress: Progress) -> tuple[QuantizeOptions, tuple[str, ...]]:
    """The options with a GGUF source, and warnings; a folder is converted into `work` first."""
    if not options.source.is_dir():
        return options, ()
    from .convert import ConvertOptions, convert

    check_target(options.target, [options.source])
    work.mkdir(exist_ok=True)
    name = options.source.resolve().name
    after = least_bits(options.type) if options.type else 0.0
    done = convert(ConvertOptions(options.source, work / f"{name}.gguf", name=name, bits_after=after), progress)
    return replace(options, source=done.path), done.warnings


def _check_target(options: MakeOptions) -> None:
    """The output must be fit to be written before minutes are spent on measuring."""
    others = (options.quantize.imatrix, options.text)
    check_target(options.quantize.target, [options.quantize.source, *(path for path in others if path is not None)])


def _with_chosen_types(
    options: MakeOptions, quantizing: QuantizeOptions, work: Path, progress: Progress
) -> tuple[QuantizeOptions, Measurement | None]:
    if options.target_bpw is None and options.target_bytes is None:
        return quantizing, None
    _check_target(options)
    model = open_model_file(quantizing.source)
    weights = sum(tensor.parameters for tensor in model.tensors)
    bpw = options.target_bpw or 8 * (options.target_bytes or 0) / weights
    base = replace(quantizing, type=quantizing.type or next((name for most, name in _NEAREST if bpw < most), "Q8_0"))
    first = forecast(base)
    refuse(base, first, types_are_final=False)
    measured = options.measured
    if measured is None:
        work.mkdir(exist_ok=True)
        comparison = _comparison(options, model.path, base, first, work)
        measured = measure(model, first, job_options(base, model, {}), comparison, progress)
    header = first.bytes - sum(padded(tensor.bytes) for tensor in first.tensors)
    for slack in (0, 4096):  # the recipe makes the header a little longer than the first forecast's
        budget = int(bpw * weights / 8) if options.target_bpw else (options.target_bytes or 0) - header - slack
        types = choose(measured, first, model, budget)
        note = f"target {options.target_bpw} bpw" if options.target_bpw else f"target {options.target_bytes} bytes"
        chosen = replace(base, chosen=tuple(sorted(types.items())), note=note)
        if options.target_bpw or forecast(chosen).bytes <= (options.target_bytes or 0):
            break
    return chosen, measured


def _comparison(
    options: MakeOptions, source: Path, base: QuantizeOptions, first: Forecast, folder: Path
) -> Mapping[str, Any]:
    return {
        "base": str(source),
        "text": str(options.text),
        "chunk": options.chunk,
        "most_chunks": options.most_chunks or _MEASURED_CHUNKS,
        "threads": base.threads or len(os.sched_getaffinity(0)),
        "folder": str(folder),
        "bytes_probe": 2 * sum(tensor.weights for tensor in first.tensors) + (64 << 20),
    }


def _report(options: MakeOptions, source: Path, result: QuantizeResult, progress: Progress) -> Report:
    wanted = ReportOptions(
        source=source,
        models=(result.paths[0],),
        text=options.text or Path(),
        chunk=options.chunk,
        most_chunks=options.most_chunks,
        threads=options.quantize.threads,
    )
    found = report(wanted, lambda done, of: progress("measuring quality", done, of))
    found = replace(found, source=options.quantize.source.name)
    recipe.add_to_manifest(result.manifest, {"report": asdict(found)})
    if options.plot is not None:
        plot(found.models, options.plot)
    return found
