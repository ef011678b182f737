"""What a plan is made from and what it says: `Limits` (what a user allows) and `Plan` (what will be done). Plain data.

Knows neither how a plan is made nor the engine. Invariant: `Draft` is complete: opening a model needs nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ..settings import Adapter, ContextSettings, ModelSettings, Override, Placement, Rope, Tiers

ANSWER_TOKENS = 256  # of the goal `mixed`, after a prompt of the expected depth
#: what a plan is to be fast at: decode, prefill, or a prompt of the expected depth and an answer of ANSWER_TOKENS
GOALS = ("decode", "prompt", "mixed")
_LOAD_MODES = {(False, False): "none", (True, False): "mmap", (False, True): "mlock", (True, True): "mmap+mlock"}


def goal_weights(goal: str, depth: int) -> tuple[float, float]:
    """How many tokens a goal decodes and reads: weights of the seconds of one of each."""
    return {"decode": (1.0, 0.0), "prompt": (0.0, 1.0), "mixed": (float(ANSWER_TOKENS), float(depth))}[goal]


@dataclass(frozen=True)
class Limits:
    """What the user allows or fixes. None: the planner chooses. Bytes, tokens and counts.

    `goal`: one of GOALS; `depth`: tokens expected in the context, for which the plan is to be fast. `kv_vram`: bytes of
    KV that may lie on the device, the other cells in host memory as `kv_ram_type` (None: the type they have);
    `kv_policy`, `kv_cpu_tokens`, `kv_share`: how those are used (settings.Tiers). `vram` 0: the CPU alone.
    `stock_only`: plan nothing that stock llama.cpp cannot do. `strict`: settings without an effect are an error.
    `n_outputs`: tokens of a micro-batch whose logits are wanted; a prompt needs its last one's, and those of a whole
    micro-batch would take some 300 MB of the device. `adapters`, `override_kv`, `rope`: changes to the model.
    `parallel`: requests that are answered at once, in one context.
    """

    n_ctx: int | None = None
    tokens_needed: int = 0
    n_gpu_layers: int | None = None
    vram: int | None = None
    ram: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    threads: int | None = None
    threads_batch: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_outputs: int = 1
    parallel: int = 1
    placement: Placement = field(default_factory=Placement)
    goal: str = "mixed"
    depth: int | None = None
    kv_vram: int | None = None
    kv_ram_type: str | None = None
    kv_policy: str = "fill"
    kv_cpu_tokens: int | None = None
    kv_share: float | None = None
    stock_only: bool = False
    strict: bool = False
    adapters: tuple[Adapter, ...] = ()
    override_kv: tuple[Override, ...] = ()
    rope: Rope = field(default_factory=Rope)


@dataclass(frozen=True)
class Reason:
    """Why a number of the plan is what it is."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device ("CPU": host memory)."""

    device: str
    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True)
class Predicted:
    """Tokens a second at `depth` tokens of context: decode of one more; prefill of so long a prompt from empty."""

    decode_tps: float
    prompt_tps: float
    depth: int


@dataclass(frozen=True)
class KvPlan:
    """Cells (tokens) of the KV cache in each memory, and bytes of all of it."""

    cells_device: int
    cells_host: int
    bytes: int


@dataclass(frozen=True)
class Draft:
    """What the engine would be opened with: a candidate while planning, and what a plan is in the end.

    Both settings have the same placement; `with_placement` sees to that.
    """

    model: ModelSettings
    context: ContextSettings

    @property
    def placement(self) -> Placement:
        return self.model.placement

    def with_placement(self, placement: Placement, n_gpu_layers: int | None = None) -> Self:
        """The same with weights and KV elsewhere. `n_gpu_layers` None: as many as before."""
        layers = self.model.n_gpu_layers if n_gpu_layers is None else n_gpu_layers
        model = replace(self.model, n_gpu_layers=layers, placement=placement)
        return replace(self, model=model, context=replace(self.context, placement=placement))

    def with_layers(self, n_gpu_layers: int) -> Self:
        return replace(self, model=replace(self.model, n_gpu_layers=n_gpu_layers))

    def with_context(self, n_ctx: int) -> Self:
        return replace(self, context=replace(self.context, n_ctx=n_ctx))

    def with_batch(self, n_ubatch: int) -> Self:
        return replace(self, context=replace(self.context, n_ubatch=n_ubatch))


@dataclass(frozen=True)
class Plan(Draft):
    """What will be done. `memory` holds exact bytes by device; `reasons` says why, number by number.

    `predicted` is None where the machine was not measured.
    """

    n_layers: int
    kv: KvPlan
    memory: tuple[MemoryUse, ...] = ()
    predicted: Predicted | None = None
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def bytes_host(self) -> int:
        return sum(use.total for use in self.memory if use.device == "CPU")

    @property
    def bytes_device(self) -> int:
        return sum(use.total for use in self.memory if use.device != "CPU")

    def as_json(self) -> dict[str, Any]:
        """The keys that `hgguf plan --json` promises."""
        context = self.context
        return {
            "placement": [asdict(use) | {"total": use.total} for use in self.memory],
            "n_gpu_layers": self.model.n_gpu_layers,
            "n_layers": self.n_layers,
            "n_ctx": context.n_ctx,
            "kv": {"type_k": context.type_k, "type_v": context.type_v, **asdict(self.kv)},
            "threads": {"decode": context.threads, "prompt": context.threads_batch},
            "batch": {"n_batch": context.n_batch, "n_ubatch": context.n_ubatch},
            "flash_attention": context.flash_attention,
            **placement_json(self.placement),
            **changes_json(self.model, context),
            "bytes": {"device": self.bytes_device, "host": self.bytes_host},
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "reasons": [asdict(reason) for reason in self.reasons],
            "warnings": list(self.warnings),
        }

    def as_arguments(self) -> tuple[str, ...]:
        """The plan as flags of stock llama.cpp's programs, `--fit off` so that it changes nothing."""
        place, context = self.placement, self.context
        arguments = ["--fit", "off", "-c", str(context.n_ctx), "-ngl", str(self.model.n_gpu_layers),
                     "-t", str(context.threads), "-tb", str(context.threads_batch), "-b", str(context.n_batch),
                     "-ub", str(context.n_ubatch), "-ctk", context.type_k, "-ctv", context.type_v,
                     "-fa", context.flash_attention]  # fmt: skip
        arguments += [] if place.kv_offload else ["-nkvo"]
        for pattern, buffer_type in place.patterns:
            arguments += ["-ot", f"{pattern}={buffer_type}"]
        arguments += ["-dev", ",".join(place.devices) or "none"] if place.devices is not None else []
        arguments += ["-ts", ",".join(f"{share:g}" for share in place.tensor_split)] if place.tensor_split else []
        arguments += ["-sm", place.split_mode] if place.split_mode != "layer" else []
        arguments += ["-mg", str(place.main_gpu)] if place.main_gpu else []
        # --mlock and --no-mmap became values of --load-mode; mmap alone is its default.
        arguments += change_arguments(self.model, context)
        mode = _LOAD_MODES[place.use_mmap, place.use_mlock]
        return (*arguments, "-lm", mode) if mode != "mmap" else tuple(arguments)


def changes_json(model: ModelSettings, context: ContextSettings) -> dict[str, Any]:
    """What is changed of the model, as a plan's JSON has it; nothing where nothing is."""
    found: dict[str, Any] = {"adapters": [asdict(adapter) for adapter in model.adapters]}
    found["override_kv"] = [str(override) for override in model.override_kv]
    found["rope"] = {name: value for name, value in asdict(context.rope).items() if value is not None}
    return {name: value for name, value in found.items() if value}


def change_arguments(model: ModelSettings, context: ContextSettings) -> list[str]:
    """The same as flags of llama.cpp's programs."""
    arguments: list[str] = []
    for adapter in model.adapters:
        arguments += ["--lora-scaled", f"{adapter.path}:{adapter.scale:g}"]
    for override in model.override_kv:
        arguments += ["--override-kv", str(override)]
    for name, value in asdict(context.rope).items():
        if value is not None:
            family = "rope" if name in ("scaling", "freq_base", "freq_scale") else "yarn"
            arguments += [f"--{family}-{name.replace('_', '-')}", str(value)]
    return arguments


#: a tier's key in a plan's JSON: the field of Tiers
TIER_KEYS = {"tier_cells": "cells", "tier_type": "type", "tier_policy": "policy", "tier_cpu_tokens": "cpu_tokens",
             "tier_share": "share"}  # fmt: skip


def placement_json(placement: Placement) -> dict[str, Any]:
    """A placement's keys in a plan's JSON: "overrides" are all patterns, those for `on_host` first."""
    fields = {name: value for name, value in asdict(placement).items() if name != "tiers"}
    tiers = {key: getattr(placement.tiers or Tiers(0), name) for key, name in TIER_KEYS.items()}
    if placement.tiers is None:
        tiers["tier_cells"] = None
    return fields | {"overrides": placement.patterns} | tiers
