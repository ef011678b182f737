"""What a model and a context are opened with, as plain data: no ctypes, no engine, so that plans can be made from it.

Invariant: every field maps to one field of llama_model_params or llama_context_params (include/llama.h).
"""

from __future__ import annotations

from dataclasses import dataclass

#: names of KV cache types as llama.cpp's flags spell them, with their number in ggml.h
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}  # enum ggml_numa_strategy
KV_POLICIES = {"fill": 0, "recent": 1}  # enum hg_kv_policy (include/hg-tiers.h)
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Placement:
    """Where weights and KV lie, beside how many layers are on devices: what limits, a plan and the engine share.

    `overrides`: (tensor name pattern, buffer type name), llama.cpp's `-ot`. `tier_cells`: KV cells on the device, the
    rest in host memory as `tier_type` (None: as on the device); None: one memory. `tier_policy`: which cells those are;
    `tier_cpu_tokens`: micro-batches up to so many tokens attend to host cells on the CPU, larger ones on the device;
    `tier_share`: part of the host cells that goes to the device meanwhile; None: none.
    """

    overrides: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    use_mmap: bool = True
    use_mlock: bool = False
    kv_offload: bool = True
    tier_cells: int | None = None
    tier_type: str | None = None
    tier_policy: str = "fill"
    tier_cpu_tokens: int | None = None
    tier_share: float | None = None


@dataclass(frozen=True)
class ModelSettings:
    """How weights are loaded."""

    n_gpu_layers: int = 0
    placement: Placement = Placement()


@dataclass(frozen=True)
class ContextSettings:
    """How a context is made. `n_ctx`, `n_batch`, `n_ubatch` in tokens; `threads_batch` is for prompts.

    `n_outputs`: tokens of a micro-batch whose logits are wanted, for which scratch is kept; 0: all. More is an abort.
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
    placement: Placement = Placement()


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
