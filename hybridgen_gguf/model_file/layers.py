"""What each layer of a model keeps for its context, from header keys and the architecture's own rules. Pure.

Many files name a sliding window but not which layers use it: the rule is then the architecture's. Source: the
`load_arch_hparams` of `src/models/*.cpp` in the pinned engine. Knows no tensors and no bytes of weights.
Invariant: what the engine would give a KV cache to has `n_head_kv > 0`, and only that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import BadFile
from ..printable import printable
from ..settings import CELL_STEP
from ..units import round_up
from .header import ArrayView, Value
from .types import row_bytes

MOST_LAYERS = 512  # LLAMA_MAX_LAYERS


@dataclass(frozen=True, slots=True)
class LayerShape:
    """`n_head_kv` 0: no KV cache of its own; `head_v` 0: values are not stored; `window` 0: sees the whole context."""

    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    window: int
    recurrent: bool

    @property
    def queries(self) -> int:
        """Query heads that share one KV head."""
        return max(self.n_head // self.n_head_kv, 1)

    def cell_bytes(self, type_k: str, type_v: str) -> int:
        """Bytes of K and V of one token."""
        return row_bytes(type_k, self.n_head_kv * self.head_k) + row_bytes(type_v, self.n_head_kv * self.head_v)


@dataclass(frozen=True, slots=True)
class _Window:
    """Of `period` layers the last (or, `dense_first`, the first) sees everything; 0: all are windowed.

    `size`: the window when the file names none; `fixed`: whatever the file says; `key`: only with a window key.
    """

    period: int
    dense_first: bool = False
    size: int = 0
    fixed: bool = False
    key: bool = True


_WINDOWS = {
    "afmoe": _Window(4),
    "cohere2": _Window(4),
    "cohere2moe": _Window(4, dense_first=True),
    "deepseek4": _Window(0),
    "exaone-moe": _Window(4, size=128, key=False),
    "exaone4": _Window(4, size=4096, key=False),
    "gemma-embedding": _Window(6),
    "gemma2": _Window(2, size=4096, key=False),
    "gemma3": _Window(6),
    "gemma3n": _Window(5),
    "gpt-oss": _Window(2),
    "laguna": _Window(4, dense_first=True),
    "lfm2": _Window(0),
    "llama4": _Window(4, size=8192, fixed=True, key=False),
    "mellum": _Window(4),
    "modern-bert": _Window(3, dense_first=True),
    "muse-glimmer": _Window(4),
    "olmo2": _Window(4),
    "plamo3": _Window(8),
    "smallthinker": _Window(4, dense_first=True, size=4096, fixed=True),
    # These give one flag a layer in the file; the period is never used.
    **{name: _Window(1) for name in ("dots3note", "gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35")},
}
# Linear-attention layers between full ones: every 4th is full unless `full_attention_interval` says otherwise.
_INTERVAL = {"qwen3next", "qwen35", "qwen35moe", "qwen4exp", "minimax-01"}
_INTERVAL_DEFAULT = 4
_KV_FIRST_LAYERS = {"gemma3n": 20}  # later layers read the cache of earlier ones


class Keys:
    """Header keys of one architecture, with their types checked. Raises BadFile naming the key."""

    def __init__(self, metadata: Mapping[str, Value], file: str) -> None:
        self._metadata, self._file = metadata, file
        self.architecture = self.text("general.architecture")
        if not self.architecture:
            raise BadFile(f"{file} names no architecture (key 'general.architecture')")

    def text(self, key: str) -> str:
        """The text under the full `key`, or empty."""
        value = self._metadata.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number ≥ 0 under `ARCHITECTURE.key`; an array gives its largest element."""
        value = self._find(key, default)
        return max(self._array(key, value), default=0) if isinstance(value, ArrayView) else self._whole(key, value)

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> tuple[int, ...]:
        """The number of each layer; one number stands for all."""
        value = self._find(key, default)
        if not isinstance(value, ArrayView):
            return (self._whole(key, value),) * n_layers
        numbers = self._array(key, value)
        if len(numbers) < n_layers:
            raise BadFile(f"{self._file}: key '{key}' has {len(numbers)} elements for {n_layers} layers")
        return numbers[:n_layers]

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata

    def is_array(self, key: str) -> bool:
        return isinstance(self._metadata.get(f"{self.architecture}.{key}"), ArrayView)

    def _find(self, key: str, default: int | None) -> Value:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            shown = printable(self.architecture, limit=60)
            raise BadFile(f"{self._file} has no key '{shown}.{key}'", "is it a complete language model?")
        return value

    def _whole(self, key: str, value: object) -> int:
        if not isinstance(value, int) or value < 0:
            raise self._wrong(f"{self.architecture}.{key}", "a whole number")
        return int(value)

    def _array(self, key: str, view: ArrayView) -> tuple[int, ...]:
        if view.count > MOST_LAYERS:
            raise BadFile(
                f"{self._file}: key '{key}' has {view.count:,} elements; the engine knows {MOST_LAYERS} layers"
            )
        return tuple(self._whole(key, element) for element in view.load())

    def _wrong(self, key: str, wanted: str) -> BadFile:
        return BadFile(f"{self._file}: key '{key}' must be {wanted}")


def layer_shapes(keys: Keys) -> tuple[LayerShape, ...]:
    """One entry a layer; those for drafting (`nextn_predict_layers`) keep no KV in a normal context."""
    n_layers = keys.number("block_count")
    if n_layers > MOST_LAYERS:
        raise BadFile(f"{keys.architecture}.block_count is {n_layers:,}; the engine knows at most {MOST_LAYERS} layers")
    heads = keys.per_layer("attention.head_count", n_layers, 0)
    heads_kv = keys.per_layer("attention.head_count_kv", n_layers) if keys.has("attention.head_count_kv") else heads
    default = keys.number("embedding_length") // max(heads[0], 1) if heads and heads[0] else 0
    head_k, head_v = keys.number("attention.key_length", default), keys.number("attention.value_length", default)
    swa_k, swa_v = keys.number("attention.key_length_swa", head_k), keys.number("attention.value_length_swa", head_v)
    latent = keys.number("attention.key_length_mla", 0) > 0  # MLA stores one latent row and no values
    windows, recurrent = _windows(keys, n_layers), _recurrent(keys, n_layers, heads_kv)
    cached = _cached_layers(keys, n_layers)
    return tuple(
        LayerShape(
            n_head=heads[il],
            n_head_kv=0 if recurrent[il] or il >= cached else heads_kv[il],
            head_k=swa_k if windows[il] else head_k,
            head_v=0 if latent else swa_v if windows[il] else head_v,
            window=windows[il],
            recurrent=recurrent[il],
        )
        for il in range(n_layers)
    )


def window_size(keys: Keys) -> int:
    """Cells of the sliding window, 0 when the engine uses none for this file."""
    rule = _WINDOWS.get(keys.architecture)
    if rule is None or (keys.architecture == "exaone4" and keys.number("block_count") != 64):
        return 0
    size = keys.number("attention.sliding_window", 0)
    if keys.architecture == "llama4" and keys.has("attention.sliding_window") and size == 0:
        return 0
    if rule.key and size == 0:
        return 0
    return rule.size if rule.fixed else size or rule.size


def _windows(keys: Keys, n_layers: int) -> tuple[int, ...]:
    size, key = window_size(keys), "attention.sliding_window_pattern"
    if size == 0:
        return (0,) * n_layers
    rule = _WINDOWS[keys.architecture]
    if keys.is_array(key):
        flags = [flag != 0 for flag in keys.per_layer(key, n_layers)]
    else:
        period = keys.number(key, rule.period)
        flags = [_is_windowed(il, period, rule.dense_first) for il in range(n_layers)]
    return tuple(size if flag else 0 for flag in flags)


def _is_windowed(il: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    return il % period != 0 if dense_first else il % period < period - 1


def _recurrent(keys: Keys, n_layers: int, heads_kv: tuple[int, ...]) -> tuple[bool, ...]:
    if keys.architecture not in _INTERVAL:
        return tuple(heads == 0 for heads in heads_kv)
    if keys.has("attention.recurrent_layers"):
        return tuple(flag != 0 for flag in keys.per_layer("attention.recurrent_layers", n_layers))
    interval = max(keys.number("full_attention_interval", _INTERVAL_DEFAULT), 1)
    return tuple((il + 1) % interval != 0 for il in range(n_layers))


def _cached_layers(keys: Keys, n_layers: int) -> int:
    cached = n_layers - keys.number("nextn_predict_layers", 0)
    if keys.architecture == "gemma4":
        return max(n_layers - keys.number("attention.shared_kv_layers", 0), 0)
    return max(min(cached, _KV_FIRST_LAYERS.get(keys.architecture, n_layers)), 0)


def kv_cells(n_ctx: int, window: int, n_ubatch: int) -> int:
    """Cells that a layer keeps for a context of `n_ctx` tokens, one sequence."""
    n_ctx = round_up(n_ctx, CELL_STEP)
    return round_up(min(n_ctx, window + n_ubatch), CELL_STEP) if window else n_ctx


def layer_kv_bytes(layer: LayerShape, n_ctx: int, type_k: str, type_v: str, n_ubatch: int) -> int:
    """Bytes of one layer's KV cache."""
    if layer.n_head_kv == 0:
        return 0
    return layer.cell_bytes(type_k, type_v) * kv_cells(n_ctx, layer.window, n_ubatch)
