"""What a model and a context are opened with, as plain data: no ctypes, no engine, so that plans can be made from it.

Invariant: every field maps to one field of llama_model_params or llama_context_params (include/llama.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

#: names of KV cache types as llama.cpp's flags spell them, with their number in ggml.h
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}  # enum ggml_numa_strategy
KV_POLICIES = {"fill": 0, "recent": 1}  # enum hg_kv_policy (include/hg-tiers.h)
#: cells of the KV cache: the engine rounds contexts and windows up to this, and attends to whole steps
CELL_STEP = 256
LONGEST_OVERRIDE = 127  # bytes of a key or a text of struct llama_model_kv_override
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Tiers:
    """KV in two memories: `cells` of each layer on its device, the rest of the context in host memory.

    `type`: of the host cells' K and V; None: as on the device. `policy`: which cells are the device's (KV_POLICIES).
    `cpu_tokens`: micro-batches up to so many tokens attend to host cells on the CPU, larger ones on the device after a
    copy; None: the engine's default. `share`: part of the host cells (0 to 1) that goes to the device while the CPU
    attends to the others; None: none.
    """

    cells: int
    type: str | None = None
    policy: str = "fill"
    cpu_tokens: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Placement:
    """Where weights and KV lie, beside how many layers are on devices: what limits, a plan and the engine share.

    `on_host`: names of tensors that stay in host memory though their layer is on a device. `overrides`: (pattern of
    tensor names, buffer type name), llama.cpp's `-ot`; a user's, and weaker than `on_host`. `tiers` None: KV in one
    memory. `devices` None: all that the engine sees.
    """

    overrides: tuple[tuple[str, str], ...] = ()
    on_host: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    use_mmap: bool = True
    use_mlock: bool = False
    kv_offload: bool = True
    tiers: Tiers | None = None

    @property
    def of_weights(self) -> Placement:
        """The same with the cache where it lies by default: equal where the weights lie in the same places."""
        return replace(self, kv_offload=True, tiers=None)

    @property
    def patterns(self) -> tuple[tuple[str, str], ...]:
        """What the engine is given, and a flag of llama.cpp can say: the first pattern found in a name decides."""
        return (*((pattern, "CPU") for pattern in name_patterns(self.on_host)), *self.overrides)


def placement_of(stored: Mapping[str, Any]) -> Placement:
    """A placement that came as JSON, where tuples are lists. Raises TypeError for a field that there is not."""
    fields = {name: _tuples(value) for name, value in stored.items() if not name.startswith("tier_")}
    tiers = fields.get("tiers")
    if stored.get("tier_cells") is not None:  # as it was stored before tiers were a record of their own
        tiers = {name[5:]: value for name, value in stored.items() if name.startswith("tier_")}
    return Placement(**(fields | {"tiers": None if tiers is None else Tiers(**tiers)}))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def name_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Few regular expressions that are found in exactly these names of tensors: layers with the same ones share one.

    The engine compiles each pattern again for each tensor.
    """
    by_layer: dict[int, set[str]] = {}
    outside: set[str] = set()
    for name in names:
        words = name.split(".", 2)
        if len(words) == 3 and words[0] == "blk" and words[1].isdigit():
            by_layer.setdefault(int(words[1]), set()).add(words[2])
        else:
            outside.add(name)
    alike: dict[tuple[str, ...], list[int]] = {}
    for layer in sorted(by_layer):
        alike.setdefault(tuple(sorted(by_layer[layer])), []).append(layer)
    found = [rf"blk\.({'|'.join(map(str, layers))})\.({_either(rest)})" for rest, layers in alike.items()]
    return (*found, *((rf"^({_either(sorted(outside))})",) if outside else ()))


def _either(names: Iterable[str]) -> str:
    return "|".join(name.replace(".", "\\.") for name in names)


@dataclass(frozen=True)
class Adapter:
    """An adapter (LoRA) over a model's weights: W + scale * alpha / rank * B A."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class Override:
    """A value of the file's metadata that is other than in the file. Text of at most 127 bytes."""

    key: str
    value: bool | int | float | str

    @property
    def type(self) -> str:
        """As llama.cpp's --override-kv spells it."""
        return type(self.value).__name__

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        return f"{self.key}={self.type}:{shown}"


ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}  # enum llama_rope_scaling_type


@dataclass(frozen=True)
class Rope:
    """Rotary positions other than the model's; None: as the model says. `freq_scale`: positions are multiplied by it.

    `orig_ctx` (tokens), `ext_factor`, `attn_factor`, `beta_slow`, `beta_fast` belong to YaRN (arXiv 2309.00071).
    """

    scaling: str | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    orig_ctx: int | None = None
    ext_factor: float | None = None
    attn_factor: float | None = None
    beta_slow: float | None = None
    beta_fast: float | None = None


@dataclass(frozen=True)
class ModelSettings:
    """How weights are loaded, and with what changes."""

    n_gpu_layers: int = 0
    placement: Placement = Placement()
    adapters: tuple[Adapter, ...] = ()
    override_kv: tuple[Override, ...] = ()


@dataclass(frozen=True)
class ContextSettings:
    """How a context is made. `n_ctx`, `n_batch`, `n_ubatch` in tokens; `threads_batch` is for prompts.

    `n_outputs`: tokens of a micro-batch whose logits are wanted, for which scratch is kept; 0: all. More is an abort.
    `n_sequences`: requests that are answered at once, over one pool of cells; each needs an output.
    """

    n_ctx: int
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    threads: int = 1
    threads_batch: int = 1
    n_outputs: int = 0
    n_sequences: int = 1
    placement: Placement = Placement()
    rope: Rope = Rope()

    @property
    def tiers(self) -> Tiers | None:
        """The two memories of KV; None also where the device's cells are enough for all tokens."""
        tiers = self.placement.tiers
        return tiers if tiers is not None and tiers.cells < self.n_ctx else None


def model_settings_of(stored: Mapping[str, Any]) -> ModelSettings:
    """ModelSettings that came as JSON."""
    placement = placement_of(stored["placement"])
    adapters = tuple(Adapter(**adapter) for adapter in stored.get("adapters", ()))
    overrides = tuple(Override(**override) for override in stored.get("override_kv", ()))
    return ModelSettings(stored["n_gpu_layers"], placement, adapters, overrides)


def context_settings_of(stored: Mapping[str, Any]) -> ContextSettings:
    """ContextSettings that came as JSON."""
    placement, rope = placement_of(stored["placement"]), Rope(**stored.get("rope", {}))
    return ContextSettings(**{**stored, "placement": placement, "rope": rope})


@dataclass(frozen=True)
class BufferBytes:
    """Bytes that one buffer type takes: weights, KV and state, and scratch of the largest graph."""

    buffer_type: str
    device: str
    is_host: bool
    model: int
    context: int
    compute: int

    @property
    def total(self) -> int:
        return self.model + self.context + self.compute
