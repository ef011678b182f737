"""A GGUF file into a smaller one: forecast, refusals before work starts, the run in a child, checks, publication.

Knows the order of things and what users get wrong; the engine's side is `engine/quantize.py`. Invariant: the target is
published only when its size is the one forecast to the byte; an older file there survives everything else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.child import check_loads
from ..engine.jobs.digest import sha256_of
from ..errors import BadFile, EngineError, Failed, UsageError
from ..model_file.kinds import kind_of
from ..model_file.split import ModelFile, open_model_file
from ..model_file.types import ALIGNMENT, ggml_type, padded, tensor_bytes
from . import importance, recipe
from .file_types import FILE_TYPES, UNQUANTIZED, file_type
from .forecast import Fallback, Forecast, TensorForecast
from .job import run_job, stoppable
from .target import check_room, check_source, check_target, publish, remove, scratch_for, shown, starts_again
from .ternary import about_types

Progress = Callable[[str, int, int], None]
_MANIFEST_BYTES = 256  # of the manifest, for each tensor
_PLAIN = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What the user asked for. `threads` 0: one per core. `tensor_types`: (regex, type), first match wins;
    `chosen`: (tensor name, type), picked by measurement, of which the recipe keeps a hash and `note`."""

    source: Path
    target: Path
    type: str
    imatrix: Path | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    pure: bool = False
    keep_split: bool = False
    allow_requantize: bool = False
    strict: bool = False
    threads: int = 0
    chosen: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What was written. `paths`: one file, or the parts of a split; `sha256`: of each, in the same order."""

    forecast: Forecast
    paths: tuple[Path, ...]
    sha256: tuple[str, ...]
    manifest: Path
    recipe: Mapping[str, str]
    warnings: tuple[str, ...]


def forecast(options: QuantizeOptions) -> Forecast:
    """Types, fallbacks and bytes of a run with `options`, to the byte; nothing is written.

    Raises what `quantize` would raise before it starts.
    """
    model, warnings = _checked(options)
    # A recipe has the same length whatever the hashes are.
    made_of = _recipe(options, recipe.UNKNOWN, recipe.UNKNOWN if options.imatrix else "")
    return _forecast(options, model, made_of, warnings)


def quantize(options: QuantizeOptions, progress: Progress | None = None) -> QuantizeResult:
    """Writes the quantized model and its manifest. `progress(tensor, done, of)`.

    Raises UsageError, NotFound, BadFile or NoSpace before the target is touched; later errors leave it as it was.
    """
    with stoppable():
        model, warnings = _checked(options)
        check_target(options.target, [*model.paths, *([options.imatrix] if options.imatrix else [])])
        _check_opens(model)
        for part in _part_names(options, model):
            check_target(part, model.paths)
        # The source is hashed while it is quantized; its digest is put into the header at the end.
        made_of = _recipe(options, recipe.UNKNOWN, sha256_of(options.imatrix) if options.imatrix else "")
        warnings += starts_again(options.target)
        return _run(options, model, made_of, warnings, progress)


def _checked(options: QuantizeOptions) -> tuple[ModelFile, tuple[str, ...]]:
    name = file_type(options.type)
    if options.threads < 0:
        raise UsageError(f"{options.threads} threads make no sense", "give 1 or more, or 0 for one per core")
    for kind in (options.output_tensor_type, options.token_embedding_type, *(kind for _, kind in options.tensor_types)):
        if kind is not None:
            ggml_type(kind)
    if options.tensor_types and name in UNQUANTIZED:
        raise UsageError(
            f"--tensor-type has no effect with {name}", "choose a quantized type as the base, such as Q8_0"
        )
    for path in (options.source, *([options.imatrix] if options.imatrix else [])):
        check_source(path)
    model = open_model_file(options.source)
    if not model.tensors:
        raise BadFile(f"{shown(options.source)} holds no tensors", "give a model file")
    _check_patterns(options, model)
    if options.imatrix is not None:
        importance.check_fits(options.imatrix, model)
    return model, ()


def _check_opens(model: ModelFile) -> None:
    """What the other verbs refuse is not made smaller either."""
    if kind_of(model) is None and (problem := check_loads(model.path)):
        named = problem if str(model.path) in problem else f"{shown(model.path)}: {problem}"
        raise BadFile(named, "see: hgguf validate")


def _check_patterns(options: QuantizeOptions, model: ModelFile) -> None:
    for pattern, _ in options.tensor_types:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise UsageError(f"'{pattern}' is not a regular expression: {error}", "write REGEX=TYPE") from None
        if not any(expression.search(tensor.name) for tensor in model.tensors):
            raise UsageError(
                f"--tensor-type '{pattern}' matches no tensor of {shown(options.source)}", "see: hgguf inspect"
            )


def _recipe(options: QuantizeOptions, source_sha256: str, imatrix_sha256: str) -> dict[str, str]:
    said = {
        "type": file_type(options.type),
        "tensor_types": [list(pair) for pair in options.tensor_types],
        "output_tensor_type": options.output_tensor_type,
        "token_embedding_type": options.token_embedding_type,
        "pure": options.pure,
        "keep_split": options.keep_split,
        "allow_requantize": options.allow_requantize,
        "note": options.note,
        "chosen_sha256": _chosen_sha256(options),
    }
    made_of = {
        "tool": recipe.tool_version(),
        "source_sha256": source_sha256,
        "options": recipe.canonical({key: value for key, value in said.items() if value}),
    }
    return {**made_of, "imatrix_sha256": imatrix_sha256} if imatrix_sha256 else made_of


def _overrides(options: QuantizeOptions) -> list[list[str]]:
    chosen = [[f"^{re.escape(name)}$", kind] for name, kind in options.chosen]
    return [*chosen, *(list(pair) for pair in options.tensor_types)]


def _chosen_sha256(options: QuantizeOptions) -> str:
    return hashlib.sha256(recipe.canonical(dict(options.chosen)).encode()).hexdigest() if options.chosen else ""


def job_options(options: QuantizeOptions, model: ModelFile, made_of: Mapping[str, str]) -> dict[str, Any]:
    """The options of a quantize or forecast job in a child."""
    name = file_type(options.type)
    metadata: dict[str, str | int] = dict(recipe.entries(made_of))
    if model.headers[0].alignment != ALIGNMENT:
        # The engine pads to 32 but would copy the source's key: a file that no reader could open.
        metadata["general.alignment"] = ALIGNMENT
    return {
        "source": str(model.path),
        "shards": [str(path) for path in model.paths],
        "threads": options.threads,
        "file_type": FILE_TYPES[name],
        "only_copy": name == "COPY",
        "output_tensor_type": options.output_tensor_type,
        "token_embedding_type": options.token_embedding_type,
        "tensor_types": _overrides(options),
        "pure": options.pure,
        "keep_split": options.keep_split and len(model.paths) > 1,
        "allow_requantize": options.allow_requantize,
        "imatrix": str(options.imatrix) if options.imatrix else "",
        "metadata": metadata,
    }


def _forecast(
    options: QuantizeOptions, model: ModelFile, made_of: Mapping[str, str], warnings: tuple[str, ...]
) -> Forecast:
    return _as_forecast(run_job("forecast", job_options(options, model, made_of)), options, model, warnings)


def _as_forecast(
    found: Mapping[str, Any], options: QuantizeOptions, model: ModelFile, warnings: tuple[str, ...]
) -> Forecast:
    if sorted(tensor["name"] for tensor in found["tensors"]) != sorted(tensor.name for tensor in model.tensors):
        raise EngineError(
            f"the engine's forecast for {shown(options.source)} does not name its tensors", "please report this"
        )
    tensors = tuple(
        TensorForecast(
            t["name"], t["rows"] * t["columns"], t["from"], t["to"], tensor_bytes(t["to"], (t["columns"], t["rows"]))
        )
        for t in found["tensors"]
    )
    size_of = {tensor.name: padded(tensor.bytes) for tensor in tensors}
    if options.keep_split and len(model.paths) > 1:
        groups = [[tensor.name for tensor in header.tensors] for header in model.headers]
    else:
        groups = [list(size_of)]
    file_bytes = tuple(
        meta + sum(size_of[name] for name in names) for meta, names in zip(found["meta_bytes"], groups, strict=True)
    )
    fallbacks = tuple(Fallback(f["tensor"], f["columns"], f["wanted"], f["used"]) for f in found["fallbacks"])
    kinds = sorted({t.source_type for t in tensors if _requantized(t)})
    if kinds and options.allow_requantize:
        warnings += (f"the source is already quantized ({', '.join(kinds)}): quality drops below that of the original",)
    warnings += about_types(model, tensors)
    return Forecast(file_type(options.type), tensors, fallbacks, file_bytes, warnings)


def _requantized(tensor: TensorForecast) -> bool:
    return tensor.source_type not in _PLAIN and tensor.type != tensor.source_type


def refuse(options: QuantizeOptions, plan: Forecast, *, types_are_final: bool = True) -> None:
    """Raises the reason why a run as forecast would be wrong or unwanted."""
    kinds = sorted({tensor.source_type for tensor in plan.tensors if _requantized(tensor)})
    if kinds and not options.allow_requantize:
        raise Failed(
            f"{shown(options.source)} is already quantized ({', '.join(kinds)})",
            "start from the F16 or BF16 original, or pass --allow-requantize and lose quality",
        )
    if not types_are_final:
        return
    importance.check_covers(options.imatrix, plan)
    if options.strict and plan.fallbacks:
        first = plan.fallbacks[0]
        raise Failed(
            f"{len(plan.fallbacks)} of {len(plan.tensors)} tensors cannot be {first.wanted} and --strict is set: "
            f"{first.tensor} has rows of {first.columns}",
            f"drop --strict to use {first.used} there, or choose a type with blocks of 32, such as Q4_0 or Q8_0",
        )


def _run(
    options: QuantizeOptions,
    model: ModelFile,
    made_of: dict[str, str],
    warnings: tuple[str, ...],
    progress: Progress | None,
) -> QuantizeResult:
    scratch = scratch_for(options.target)
    parts = _part_names(options, model)
    if parts:
        scratch.mkdir()
    written = [scratch / part.name for part in parts] or [scratch]
    job = {
        **job_options(options, model, made_of),
        "scratch": str(scratch / _stem(options.target) if parts else scratch),
        "recipe": {**recipe.place("source_sha256"), "written": [str(path) for path in written]},
    }
    plans: list[Forecast] = []

    def tell(event: Mapping[str, Any]) -> None:
        if "ask" in event:
            plans.append(_as_forecast(event["ask"], options, model, warnings))
            refuse(options, plans[0])
            check_room(options.target, plans[0].bytes + _MANIFEST_BYTES * len(plans[0].tensors))
        elif progress is not None:
            progress(event["tensor"], event["done"], event["of"])

    try:
        done = run_job("quantize", job, tell, [scratch])
        plan = plans[0]
        _check_sizes(written, plan)
        made_of, hashes = {**made_of, "source_sha256": done["source_sha256"]}, tuple(done["sha256"])
        targets = parts or [options.target]
        # The first part comes last: a set without it is not taken for a model.
        for path, target in reversed(list(zip(written, targets, strict=True))):
            publish(path, target)
    finally:
        remove(scratch)
    warnings = plan.warnings + _about_imatrix(done["missing_imatrix"])
    if options.imatrix is not None:
        warnings += importance.about_origin(options.imatrix, done["source_sha256"])
    manifest = recipe.write_manifest(options.target, _manifest(plan, targets, hashes, made_of))
    return QuantizeResult(plan, tuple(targets), hashes, manifest, made_of, warnings)


def _about_imatrix(missing: list[str]) -> tuple[str, ...]:
    usual = {"token_embd.weight", "output.weight"}
    odd = [name for name in missing if name not in usual]
    return (f"the importance matrix has nothing for {len(odd)} tensors, such as {odd[0]}",) if odd else ()


def _check_sizes(written: list[Path], plan: Forecast) -> None:
    for path, expected in zip(written, plan.file_bytes, strict=True):
        size = path.stat().st_size if path.exists() else 0
        if size != expected:
            raise EngineError(
                f"the engine wrote {size} bytes where {expected} were forecast; nothing was kept", "please report this"
            )


def _part_names(options: QuantizeOptions, model: ModelFile) -> list[Path]:
    count = len(model.paths)
    if not options.keep_split or count == 1:
        return []
    stem = _stem(options.target)
    return [options.target.with_name(f"{stem}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]


def _stem(target: Path) -> str:
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", target.name)


def _manifest(
    plan: Forecast, targets: list[Path], hashes: tuple[str, ...], made_of: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "files": [
            {"name": path.name, "bytes": size, "sha256": digest}
            for path, size, digest in zip(targets, plan.file_bytes, hashes, strict=True)
        ],
        "recipe": dict(made_of),
        "type": plan.type,
        "bpw": round(plan.bpw, 4),
        "types": plan.types,
        "tensors": {tensor.name: tensor.type for tensor in plan.tensors},
    }
