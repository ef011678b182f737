"""What a plan is made from and what it says: `Limits` (what a user allows) and `Plan` (what will be done). Plain data.

Knows neither how a plan is made nor the engine. Invariant: `Plan` is complete: opening a model needs nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..settings import Placement
from .cost import Predicted

#: what a plan is to be fast at: writing, reading prompts, or a prompt of the expected depth and an answer of 256 tokens
GOALS = ("decode", "prompt", "mixed")
_LOAD_MODES = {(False, False): "none", (True, False): "mmap", (False, True): "mlock", (True, True): "mmap+mlock"}


@dataclass(frozen=True)
class Limits:
    """What the user allows or fixes. None: the planner chooses. Bytes, tokens and counts.

    `goal`: one of GOALS; `depth`: tokens expected in the context, for which the plan is to be fast. `kv_vram`: bytes of
    KV that may lie on the device, the other cells in host memory as `kv_ram_type` (None: the type they have).
    `stock_only`: plan nothing that stock llama.cpp cannot do. `n_outputs`: tokens of a micro-batch whose logits are
    wanted; a prompt needs its last one's, and those of a whole micro-batch would take some 300 MB of the device.
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
    placement: Placement = field(default_factory=Placement)
    goal: str = "mixed"
    depth: int | None = None
    kv_vram: int | None = None
    kv_ram_type: str | None = None
    stock_only: bool = False


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
class KvPlan:
    """The KV cache: types of K and V, cells (tokens) in each tier, bytes of all of it."""

    type_k: str
    type_v: str
    cells_device: int
    cells_host: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What will be done. `memory` holds exact bytes by device; `reasons` says why, number by number.

    `predicted` is None where the machine was not measured.
    """

    n_ctx: int
    n_gpu_layers: int
    n_layers: int
    kv: KvPlan
    threads: int
    threads_batch: int
    n_batch: int
    n_ubatch: int
    flash_attention: str
    n_outputs: int = 1
    placement: Placement = field(default_factory=Placement)
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
        return {
            "placement": [asdict(use) | {"total": use.total} for use in self.memory],
            "n_gpu_layers": self.n_gpu_layers,
            "n_layers": self.n_layers,
            "n_ctx": self.n_ctx,
            "kv": asdict(self.kv),
            "threads": {"decode": self.threads, "prompt": self.threads_batch},
            "batch": {"n_batch": self.n_batch, "n_ubatch": self.n_ubatch},
            "flash_attention": self.flash_attention,
            **asdict(self.placement),  # "overrides", "devices" and so on
            "bytes": {"device": self.bytes_device, "host": self.bytes_host},
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "reasons": [asdict(reason) for reason in self.reasons],
            "warnings": list(self.warnings),
        }

    def as_arguments(self) -> tuple[str, ...]:
        """The plan as flags of stock llama.cpp's programs, `--fit off` so that it changes nothing."""
        place = self.placement
        arguments = ["--fit", "off", "-c", str(self.n_ctx), "-ngl", str(self.n_gpu_layers), "-t", str(self.threads),
                     "-tb", str(self.threads_batch), "-b", str(self.n_batch), "-ub", str(self.n_ubatch),
                     "-ctk", self.kv.type_k, "-ctv", self.kv.type_v, "-fa", self.flash_attention]  # fmt: skip
        arguments += [] if place.kv_offload else ["-nkvo"]
        for pattern, buffer_type in place.overrides:
            arguments += ["-ot", f"{pattern}={buffer_type}"]
        arguments += ["-dev", ",".join(place.devices) or "none"] if place.devices is not None else []
        arguments += ["-ts", ",".join(f"{share:g}" for share in place.tensor_split)] if place.tensor_split else []
        arguments += ["-sm", place.split_mode] if place.split_mode != "layer" else []
        arguments += ["-mg", str(place.main_gpu)] if place.main_gpu else []
        # --mlock and --no-mmap became values of --load-mode; mmap alone is its default.
        mode = _LOAD_MODES[place.use_mmap, place.use_mlock]
        return (*arguments, "-lm", mode) if mode != "mmap" else tuple(arguments)
