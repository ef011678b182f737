"""What a model file holds, from its header alone: sizes, layers, weights by group, forecast of the KV cache.

The planner's view of a model; no tensor data is read and no engine is needed. The KV forecast follows the engine's
rules (types, windows, rounding to 256 cells); what the engine then allocates is asked from the engine itself.
Does not know devices, templates' meaning or text. Invariant: `bytes_weights` is the sum over `groups`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import BadFile
from ..printable import printable
from .header import ArrayView, TensorInfo
from .layers import Keys, LayerShape, layer_kv_bytes, layer_shapes, window_size
from .split import ModelFile, open_model_file
from .types import file_type_name

Kind = Literal["attention", "ffn", "experts", "embedding", "output", "norm", "other"]
_BLOCK = re.compile(r"(?:(?:enc|dec)\.)?blk\.(\d{1,4})\.(.+)")
_NOT_MODELS = {
    "adapter": "an adapter (LoRA), not a model",
    "imatrix": "an importance matrix, not a model",
    "mmproj": "an image or audio projector, not a language model",
}


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are placed together. `layer`: None outside the layers; `bytes`: as stored; `types`: sorted names."""

    name: str
    layer: int | None
    kind: Kind
    bytes: int
    parameters: int
    types: tuple[str, ...]
    tensors: int


@dataclass(frozen=True, slots=True)
class TypeShare:
    """How much of the weights one number format holds."""

    type: str
    tensors: int
    bytes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes in elements, `bytes_*` in bytes. `None` in the token fields: the file leaves it to the engine."""

    file: ModelFile
    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_ctx_train: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    window: int
    layers: tuple[LayerShape, ...]
    tied_output: bool
    file_type: str
    mix: tuple[TypeShare, ...]
    groups: tuple[TensorGroup, ...]
    parameters: int
    bytes_weights: int
    tokenizer: str
    chat_template: str | None
    add_bos: bool | None
    add_eos: bool | None
    bos_id: int | None
    eos_id: int | None

    @property
    def n_head(self) -> tuple[int, ...]:
        """Query heads of each layer."""
        return tuple(layer.n_head for layer in self.layers)

    @property
    def n_head_kv(self) -> tuple[int, ...]:
        """Key and value heads of each layer; 0 where a layer keeps no KV cache."""
        return tuple(layer.n_head_kv for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        return self.bytes_weights * 8 / self.parameters if self.parameters else 0.0

    @property
    def parameters_active(self) -> int:
        """Parameters that one token uses: of the experts only the chosen ones."""
        experts = sum(group.parameters for group in self.groups if group.kind == "experts")
        share = self.n_expert_used / self.n_expert if self.n_expert else 1.0
        return self.parameters - experts + round(experts * min(share, 1.0))

    @property
    def attention_layer(self) -> LayerShape | None:
        """The first layer with a cache of the whole context; None where all have a window, or none."""
        return next((layer for layer in self.layers if layer.n_head_kv and not layer.window), None)

    @property
    def forks_anywhere(self) -> bool:
        """Whether a sequence can be forked at any position: no layer has a recurrent state or forgets by a window."""
        return not any(layer.recurrent or layer.window for layer in self.layers)

    def kv_bytes(self, n_ctx: int, type_k: str = "f16", type_v: str = "f16", n_ubatch: int = 512) -> int:
        """Forecast of the KV cache for one sequence of `n_ctx` tokens. Raises UsageError for an unknown type."""
        return sum(self.kv_bytes_per_layer(n_ctx, type_k, type_v, n_ubatch))

    def kv_bytes_per_layer(
        self, n_ctx: int, type_k: str = "f16", type_v: str = "f16", n_ubatch: int = 512
    ) -> tuple[int, ...]:
        """As `kv_bytes`, for each layer."""
        return tuple(layer_kv_bytes(layer, n_ctx, type_k, type_v, n_ubatch) for layer in self.layers)


def read_shape(path: str | os.PathLike[str]) -> ModelShape:
    """The shape of the model at `path` (any part of a split one). Raises NotFound or BadFile."""
    return shape_of(open_model_file(path))


def shape_of(file: ModelFile) -> ModelShape:
    """The shape of an opened model. Raises BadFile when it is not a language model, or a key is missing or absurd."""
    shown = printable(str(file.path))
    keys = Keys(file.metadata, shown)
    kind = keys.text("general.type") if "general.type" in file.metadata else ""
    what = _NOT_MODELS.get("mmproj" if keys.architecture == "clip" else kind)
    if what:
        raise BadFile(f"{shown} is {what}")
    _check_constants(file, keys.architecture, shown)
    layers = layer_shapes(keys)
    groups = group_tensors(file.tensors)
    n_embd = keys.number("embedding_length")
    return ModelShape(
        file=file,
        architecture=keys.architecture,
        name=keys.text("general.name"),
        n_layers=len(layers),
        n_embd=n_embd,
        n_ff=keys.number("feed_forward_length", 0),
        n_ctx_train=keys.number("context_length"),
        n_vocab=_n_vocab(file, keys),
        n_expert=keys.number("expert_count", 0),
        n_expert_used=keys.number("expert_used_count", 0),
        window=window_size(keys),
        layers=layers,
        tied_output=not any(tensor.name == "output.weight" for tensor in file.tensors),
        file_type=file_type_name(file.metadata.get("general.file_type")),
        mix=type_mix(file.tensors),
        groups=groups,
        parameters=sum(group.parameters for group in groups),
        bytes_weights=sum(group.bytes for group in groups),
        tokenizer=keys.text("tokenizer.ggml.model"),
        chat_template=keys.text("tokenizer.chat_template") or None,
        add_bos=_flag(file, "tokenizer.ggml.add_bos_token"),
        add_eos=_flag(file, "tokenizer.ggml.add_eos_token"),
        bos_id=_token_id(file, "tokenizer.ggml.bos_token_id"),
        eos_id=_token_id(file, "tokenizer.ggml.eos_token_id"),
    )


def group_tensors(tensors: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    """Tensors by layer and kind, in file order of each group's first tensor."""
    found: dict[tuple[int | None, Kind], list[TensorInfo]] = {}
    for tensor in tensors:
        found.setdefault(_place(tensor.name), []).append(tensor)
    return tuple(
        TensorGroup(
            name=kind if layer is None else f"blk.{layer}.{kind}",
            layer=layer,
            kind=kind,
            bytes=sum(tensor.bytes for tensor in members),
            parameters=sum(tensor.parameters for tensor in members),
            types=tuple(sorted({tensor.type for tensor in members})),
            tensors=len(members),
        )
        for (layer, kind), members in found.items()
    )


def type_mix(tensors: Iterable[TensorInfo]) -> tuple[TypeShare, ...]:
    """The number formats used, the largest share of bytes first."""
    found: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        found.setdefault(tensor.type, []).append(tensor)
    shares = [
        TypeShare(name, len(members), sum(t.bytes for t in members), sum(t.parameters for t in members))
        for name, members in found.items()
    ]
    return tuple(sorted(shares, key=lambda share: (-share.bytes, share.type)))


def _place(name: str) -> tuple[int | None, Kind]:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None, _kind_outside(name)
    rest = match[2]
    if "norm" in rest:
        return int(match[1]), "norm"
    if rest.startswith("ffn_") and "exps" in rest:
        return int(match[1]), "experts"
    if rest.startswith("ffn_") or rest.startswith("exp_probs"):
        return int(match[1]), "ffn"
    # State-space and short-convolution mixers stand where attention does.
    if rest.startswith(("attn_", "ssm_", "time_mix", "shortconv", "indexer", "cross_attn")):
        return int(match[1]), "attention"
    return int(match[1]), "other"


def _kind_outside(name: str) -> Kind:
    if "norm" in name:
        return "norm"
    if name.startswith(("output.", "cls.", "cls")):
        return "output"
    if name.split(".")[0] in ("token_embd", "position_embd", "token_types", "per_layer_token_embd"):
        return "embedding"
    return "other"


def _check_constants(file: ModelFile, architecture: str, shown: str) -> None:
    """Constants of the arithmetic: with a norm's epsilon below zero, or rotated pairs that are none, the engine aborts
    in its first step."""
    for key, value in file.metadata.items():
        if isinstance(value, int | float) and not _is_sound(key.removeprefix(f"{architecture}."), value):
            raise BadFile(f"{shown}: key '{printable(key)}' is {value}", "the file is damaged or hostile")


def _is_sound(name: str, value: int | float) -> bool:
    if name.startswith("rope.dimension_count"):
        return value % 2 == 0
    if "freq_base" in name:
        return math.isfinite(value) and value > 0
    return "epsilon" not in name or (math.isfinite(value) and value >= 0)


def _n_vocab(file: ModelFile, keys: Keys) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayView):
        return tokens.count
    if keys.has("vocab_size"):
        return keys.number("vocab_size")
    rows = (tensor.shape[1] for tensor in file.tensors if tensor.name == "token_embd.weight" and len(tensor.shape) > 1)
    return next(rows, 0)


def _flag(file: ModelFile, key: str) -> bool | None:
    value = file.metadata.get(key)
    return value if isinstance(value, bool) else None


def _token_id(file: ModelFile, key: str) -> int | None:
    value = file.metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
