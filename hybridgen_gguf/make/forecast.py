"""What a quantization would write: types, fallbacks and bytes, and how to show them. Pure; knows no engine.

Invariant: `Forecast.bytes` is the size of the files that a run with the same options writes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..units import format_size


@dataclass(frozen=True, slots=True)
class TensorForecast:
    """One tensor's way. `bytes`: in the new type, unpadded."""

    name: str
    weights: int
    source_type: str
    type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Fallback:
    """A tensor whose rows of `columns` do not divide into `wanted`'s blocks."""

    tensor: str
    columns: int
    wanted: str
    used: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would write. `bytes`: of all files; `bpw`: bits per weight over all tensors."""

    type: str
    tensors: tuple[TensorForecast, ...]
    fallbacks: tuple[Fallback, ...]
    file_bytes: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(self.file_bytes)

    @property
    def bpw(self) -> float:
        weights = sum(tensor.weights for tensor in self.tensors)
        return sum(tensor.bytes for tensor in self.tensors) * 8 / weights if weights else 0.0

    @property
    def types(self) -> dict[str, int]:
        """Number of tensors of each type."""
        return dict(Counter(tensor.type for tensor in self.tensors).most_common())

    @property
    def needing_imatrix(self) -> dict[str, list[str]]:
        """Type (Q2_K_S: the mix) → tensors that cannot have it without an importance matrix."""
        found: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.type != tensor.source_type and _needs_imatrix(tensor, self.type):
                kind = self.type if tensor.type == "Q2_K" else tensor.type  # Q2_K_S, and no other mix with Q2_K
                found.setdefault(kind, []).append(tensor.name)
        return found

    @property
    def fallback_share(self) -> float:
        """Share of the weights in tensors that fell back, 0 to 1."""
        names = {fallback.tensor for fallback in self.fallbacks}
        weights = sum(tensor.weights for tensor in self.tensors)
        return sum(tensor.weights for tensor in self.tensors if tensor.name in names) / weights if weights else 0.0


# ggml_quantize_requires_imatrix (ggml.c), and the types whose result tensor_requires_imatrix (llama-quant.cpp) calls
# garbage, but for embeddings and output.
_NEVER_WITHOUT = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})
_GARBAGE_WITHOUT = frozenset({"IQ3_XXS", "IQ2_S", "IQ1_M"})
_EDGES = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "output.weight"})


def _needs_imatrix(tensor: TensorForecast, mix: str) -> bool:
    if tensor.type in _NEVER_WITHOUT:
        return True
    inside = tensor.name not in _EDGES
    return inside and (tensor.type in _GARBAGE_WITHOUT or (tensor.type == "Q2_K" and mix == "Q2_K_S"))


def mix_needs_imatrix(mix: str) -> bool:
    """Whether most tensors of the mix cannot do without one."""
    return mix in _NEVER_WITHOUT | _GARBAGE_WITHOUT | {"IQ2_M", "Q2_K_S"}


def as_json(plan: Forecast) -> dict[str, Any]:
    """The forecast in the form that `--json` prints."""
    return {
        "type": plan.type,
        "types": plan.types,
        "bytes": plan.bytes,
        "bpw": round(plan.bpw, 4),
        "fallbacks": [
            {"tensor": f.tensor, "columns": f.columns, "wanted": f.wanted, "used": f.used} for f in plan.fallbacks
        ],
        "fallback_share": round(plan.fallback_share, 4),
        "needs_imatrix": bool(plan.needing_imatrix),
        "warnings": list(plan.warnings),
    }


def describe(plan: Forecast) -> list[str]:
    """The forecast in plain lines, for people."""
    kinds = ", ".join(f"{name} {count}" for name, count in plan.types.items())
    lines = [
        f"{plan.type}: {format_size(plan.bytes)} ({plan.bytes} bytes), {plan.bpw:.2f} bits per weight",
        f"tensors: {kinds}",
    ]
    if plan.fallbacks:
        ways = Counter((f.wanted, f.used) for f in plan.fallbacks)
        shown_ways = ", ".join(f"{wanted} to {used} {count}" for (wanted, used), count in ways.most_common())
        share = f"{len(plan.fallbacks)} of {len(plan.tensors)} tensors, {plan.fallback_share:.0%} of the weights"
        lines.append(f"fallbacks: {share}, because their rows do not divide into blocks: {shown_ways}")
    return lines
