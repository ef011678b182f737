"""How much each tensor's rounding hurts the model's text, measured; and the types that follow for a size.

Two measurements are combined: the weighted rounding error of each tensor in each type (`engine/type_error.py`, cheap),
and the divergence that quantizing one group of tensors alone causes (`engine/compare.py`), which scales the first. A
group is one kind of tensor in one third of the layers. Invariant: the types returned keep the data within the budget.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model_file.split import ModelFile
from ..model_file.types import ggml_type, padded, tensor_bytes
from .allocate import Choice, allocate
from .forecast import Forecast
from .job import run_job
from .target import check_room

Progress = Callable[[str, int, int], None]
#: Types that tensors are given: without an importance matrix those below 4 bits are not worth having.
CANDIDATES = ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K")
WITH_IMATRIX = ("Q2_K", "IQ3_S", *CANDIDATES)
#: What a group is measured in: near the types that will be chosen. Coarser ones (Q3_K, Q4_0) misjudged ffn_down.
_PROBES = ("IQ4_NL", "Q4_0")
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Measurement:
    """`errors[tensor][type]`: weighted squared error; `scales[tensor]`: divergence per unit of it."""

    errors: Mapping[str, Mapping[str, float]]
    scales: Mapping[str, float]
    groups: Mapping[str, float]


def candidates_for(columns: int, with_imatrix: bool) -> list[str]:
    """The types whose blocks divide rows of `columns`."""
    names = WITH_IMATRIX if with_imatrix else CANDIDATES
    return [name for name in names if columns % ggml_type(name).block == 0]


def measure(
    model: ModelFile, plan: Forecast, job: Mapping[str, Any], compare: Mapping[str, Any], progress: Progress
) -> Measurement:
    """Measures every tensor that `plan` quantizes. `job`: a quantize job's options; `compare`: a compare job's."""
    columns = {tensor.name: tensor.shape[0] for tensor in model.tensors}
    names = [tensor.name for tensor in plan.tensors if tensor.type not in ("F32", "F16", "BF16")]
    found = {name: candidates_for(columns[name], bool(job["imatrix"])) for name in names}
    kinds = {name: types for name, types in found.items() if types}
    errors: dict[str, dict[str, float]] = run_job(
        "probe_errors",
        {"shards": job["shards"], "imatrix": job["imatrix"], "candidates": kinds, "threads": compare["threads"]},
        lambda event: progress("measuring types", event["done"], event["of"]),
    )["errors"]
    divergences = _divergences(_groups(list(kinds)), kinds, job, compare, progress)
    scales = {}
    for group, members in _groups(list(kinds)).items():
        total = sum(errors[name][_probe(kinds[name])] for name in members)
        scales.update(dict.fromkeys(members, divergences[group] / total if total else 0.0))
    return Measurement(errors, scales, divergences)


def _divergences(
    groups: Mapping[str, Sequence[str]],
    kinds: Mapping[str, Sequence[str]],
    job: Mapping[str, Any],
    compare: Mapping[str, Any],
    progress: Progress,
) -> dict[str, float]:
    """Mean divergence in nats a token of the model with one group alone quantized, the rest in F16."""
    found = {}
    with tempfile.TemporaryDirectory(prefix=".hgguf-", dir=compare["folder"]) as folder:
        path = Path(folder) / "probe.gguf"
        check_room(path, compare["bytes_probe"])
        for done, (group, members) in enumerate(groups.items()):
            progress("measuring sensitivity", done, len(groups))
            types = [[f"^{re.escape(name)}$", _probe(kinds[name])] for name in members]
            probe = {**job, "tensor_types": [*types, [".*", "F16"]], "metadata": {}, "scratch": str(path)}
            probe.update(keep_split=False, file_type=7, output_tensor_type=None, token_embedding_type=None, pure=True)
            run_job("quantize", probe)
            scored = {**compare, "models": [str(path)], "speed": False, "kept": str(Path(folder) / "base")}
            found[group] = float(run_job("compare", scored)["models"][0]["kld_mean"])
    return found


def choose(measured: Measurement, plan: Forecast, model: ModelFile, budget: int) -> dict[str, str]:
    """The type of each measured tensor; `budget`: bytes for all tensors of the file, padded."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    fixed = sum(padded(tensor.bytes) for tensor in plan.tensors if tensor.name not in measured.errors)
    choices = {
        name: [
            Choice(kind, padded(tensor_bytes(kind, shapes[name])), measured.scales[name] * error)
            for kind, error in errors.items()
        ]
        for name, errors in measured.errors.items()
    }
    return {name: choice.type for name, choice in allocate(choices, budget - fixed).items()}


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    layers = [int(match[1]) for match in map(_LAYER.match, names) if match]
    count = max(layers, default=0) + 1
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        group = f"{match[2]} {3 * int(match[1]) // count}" if match else name
        groups.setdefault(group, []).append(name)
    return groups


def _probe(kinds: Sequence[str]) -> str:
    """The type that a tensor of these is measured in."""
    return next((kind for kind in _PROBES if kind in kinds), kinds[0])
