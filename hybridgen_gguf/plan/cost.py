"""Predicts seconds: what each part of a model takes on each place (CPU or device), from measured rates. Pure.

A token that is written reads every active weight once and all K and V of its context once; a prompt does arithmetic
instead. On top come a fixed price of every operation and of every change between CPU and device.
Knows no bytes of memory and no budgets. Invariant: seconds are finite and above zero, and never fall with depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..machine.rates import CPU, Product, Rates
from ..model_file.header import TensorInfo
from ..model_file.layers import LayerShape
from ..model_file.shape import ModelShape
from ..model_file.types import row_bytes
from ..settings import CELL_STEP, ContextSettings
from ..units import round_up

OFFLOAD_TOKENS = 32  # from this many on, a GPU computes with weights it copies from the host (ggml-cuda: op_offload)
# Operations of a layer beside products, counted in graphs of Llama and Gemma: norm, rope of Q and K, two cache writes,
# attention, addition; norm, gate, addition. A product counts as two: its activations are quantized, then all threads
# wait for each other.
_NODES_MIXER, _NODES_FFN, _NODES_PRODUCT = 7, 3, 2
_FIXED = 150e-6  # seconds of one call of the decoder beside its graph: inputs, outputs, bookkeeping


@dataclass(frozen=True)
class Use:
    """What a prediction is for: `depth` tokens in a context that is opened like this."""

    depth: int
    context: ContextSettings

    @property
    def types(self) -> tuple[str, str]:
        """Types of K and V, of a device's cells where the host's have others."""
        return self.context.type_k, self.context.type_v

    @property
    def host_types(self) -> tuple[str, str]:
        """Types of K and V of cells in host memory."""
        tiers = self.context.tiers
        return self.types if tiers is None or tiers.type is None else (tiers.type, tiers.type)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer in two parts that can lie apart.

    `mixer`: attention and whatever must stay with it; `heavy`: the FFN, or the experts, or the output matrix: products
    by the name of their tensor. `bytes_*` as stored; `heavy_names`: all tensors of the heavy part.
    """

    mixer: Mapping[str, Product]
    heavy: Mapping[str, Product]
    bytes_mixer: int
    bytes_heavy: int
    heavy_names: tuple[str, ...]
    kv: LayerShape | None


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a token costs, layer by layer; the last entry of `layers` is the output."""

    layers: tuple[LayerWork, ...]
    n_embd: int
    n_ff: int
    n_vocab: int


@dataclass(frozen=True)
class PartCost:
    """Seconds of a layer's parts at one place: weights of the mixer with its fixed costs, its cache, the heavy part.

    `tensors`: of each product alone, which the parts contain.
    """

    mixer: float
    cache: float
    heavy: float
    tensors: Mapping[str, float] = field(default_factory=dict)


def work_of(shape: ModelShape) -> ModelWork:
    """The products of each layer, from the file's tensors."""
    experts = frozenset(group.layer for group in shape.groups if group.kind == "experts" and group.layer is not None)
    by_layer: dict[int, list[TensorInfo]] = {layer: [] for layer in range(shape.n_layers + 1)}
    for tensor in shape.file.tensors:
        block, _ = _block_of(tensor.name)
        is_output = tensor.name.startswith("output") or (shape.tied_output and tensor.name == "token_embd.weight")
        block = shape.n_layers if block is None and is_output else block
        if block is not None and block <= shape.n_layers:
            by_layer[block].append(tensor)
    layers = tuple(_layer_work(shape, layer, tensors, experts) for layer, tensors in by_layer.items())
    return ModelWork(layers, shape.n_embd, shape.n_ff, shape.n_vocab)


def _layer_work(shape: ModelShape, layer: int, tensors: list[TensorInfo], experts: frozenset[int]) -> LayerWork:
    share = min(shape.n_expert_used / shape.n_expert, 1.0) if shape.n_expert else 1.0
    mixer: dict[str, Product] = {}
    heavy: dict[str, Product] = {}
    sizes, names = [0, 0], []
    for tensor in tensors:
        name = _block_of(tensor.name)[1]
        is_expert = "exps" in name
        is_heavy = (
            len(tensor.shape) > 1 if layer == shape.n_layers else is_expert if layer in experts else _is_ffn(name)
        )
        sizes[is_heavy] += tensor.bytes
        names += [tensor.name] if is_heavy else []
        if len(tensor.shape) > 1 and tensor.shape[0] > 1:
            product = Product(tensor.type, math.prod(tensor.shape[1:]), tensor.shape[0], share if is_expert else 1.0)
            (heavy if is_heavy else mixer)[tensor.name] = product
    return LayerWork(mixer, heavy, sizes[0], sizes[1], tuple(sorted(set(names))), _cache_of(shape, layer))


def _cache_of(shape: ModelShape, layer: int) -> LayerShape | None:
    return shape.layers[layer] if layer < shape.n_layers and shape.layers[layer].n_head_kv else None


def _block_of(name: str) -> tuple[int | None, str]:
    words = name.split(".", 2)
    if len(words) == 3 and words[0] == "blk" and words[1].isdigit():
        return int(words[1]), words[2]
    return None, name


def _is_ffn(name: str) -> bool:
    return name.startswith("ffn_") and "norm" not in name and name.endswith("weight")


def _nodes(layer: LayerWork) -> tuple[int, int]:
    """Operations of a layer's two parts, each with a fixed price."""
    small = (_NODES_MIXER if layer.kv or layer.heavy else 2) + _NODES_PRODUCT * len(layer.mixer)
    return small, _NODES_FFN + _NODES_PRODUCT * len(layer.heavy) if layer.heavy else 0


def _with_nodes(products: dict[str, float], node: float) -> dict[str, float]:
    return {name: seconds + _NODES_PRODUCT * node for name, seconds in products.items()}


class CostModel:
    """Seconds of a model's parts on a machine for one use."""

    def __init__(self, rates: Rates, work: ModelWork, use: Use) -> None:
        self.rates, self.work, self.use, self.context = rates, work, use, use.context

    def decode(self, place: str) -> list[PartCost]:
        """For each layer (the output last), the seconds that one token of decode takes at `place`."""
        threads = self.context.threads
        node = self.rates.node(place, threads)
        costs = []
        for layer in self.work.layers:
            mixer, heavy = (
                {name: self.rates.matvec(place, product, threads) for name, product in part.items()}
                for part in (layer.mixer, layer.heavy)
            )
            cache = self._cache(place, layer, self.use.depth, threads, prefill=False)
            small, large = _nodes(layer)
            parts = (sum(mixer.values()) + small * node, cache, sum(heavy.values()) + large * node)
            costs.append(PartCost(*parts, _with_nodes(mixer | heavy, node)))
        return costs

    def prefill(self, place: str, gpu: str | None = None) -> list[PartCost]:
        """As `decode`, for each token of a prompt of `depth` tokens read from an empty context.

        `gpu`: a device that computes large batches with weights that lie on the host; they are copied for each batch.
        """
        threads, depth = self.context.threads_batch, max(self.use.depth, 1)
        batch = self._batch
        node = self.rates.node(place, threads) / batch
        costs = []
        for index, layer in enumerate(self.work.layers):
            is_output = index == len(self.work.layers) - 1  # computed for the last token of a prompt alone
            tokens = depth if is_output else 1
            mixed, heavy = (
                {name: self._product(place, gpu, product, threads) / tokens for name, product in part.items()}
                for part in (layer.mixer, layer.heavy)
            )
            small_s, large_s = (0.0 if is_output else sum(mixed.values())), sum(heavy.values())
            if not is_output:
                small_s += self._elementwise(place, threads, 14 * self.work.n_embd)
                large_s += self._elementwise(place, threads, 4 * self.work.n_ff)
            cache = self._cache(place, layer, self.use.depth / 2, threads, prefill=True)
            small, large = _nodes(layer)
            parts = (small_s + small * node, cache, large_s + large * node)
            costs.append(PartCost(*parts, _with_nodes(heavy if is_output else mixed | heavy, node)))
        return costs

    @property
    def _batch(self) -> int:
        """Tokens that are computed at once when a prompt is read."""
        return max(min(self.context.n_ubatch, self.use.depth), 1)

    def _product(self, place: str, gpu: str | None, product: Product, threads: int) -> float:
        seconds, batch = self.rates.matmul(place, product, threads), self._batch
        if place != CPU or gpu is None or batch < OFFLOAD_TOKENS:
            return seconds
        # All of the host's copy crosses the link: with many tokens nearly every expert is used by one of them.
        size = product.rows * row_bytes(product.type, product.cols)
        return (
            self.rates.matmul(gpu, product, 0)
            + self.rates.upload(gpu, size, not self.context.placement.use_mmap) / batch
        )

    def _elementwise(self, place: str, threads: int, values: int) -> float:
        return 12 * values / (self.rates.read_gbps(place, threads) * 1e9)  # two float32 read, one written

    def _cache(self, place: str, layer: LayerWork, cells: float, threads: int, *, prefill: bool) -> float:
        if layer.kv is None:
            return 0.0
        seen = min(cells, layer.kv.window) if layer.kv.window else cells
        if not prefill:  # the engine looks at whole steps of cells (llama_kv_cache: n_pad)
            seen = round_up(int(seen) + 1, CELL_STEP)
        cells, host = seen + 1, self._host_cells(place, layer.kv, seen, prefill=prefill)
        whole = self.rates.attention(place, layer.kv, self.use.types, cells, threads, prefill=prefill)
        batch = self._batch if prefill else 1
        if (
            place != CPU and not self.context.placement.kv_offload
        ):  # the engine copies the rows to the device in every step
            return whole + self._upload_rows(place, layer.kv, cells, pinned=False) / batch
        if not host:
            return whole
        if prefill:  # rows on the host cross the link once for each batch
            return whole + self._upload_rows(place, layer.kv, host, pinned=True) / batch
        there = self.rates.attention(place, layer.kv, self.use.types, max(cells - host, 1), threads, prefill=False)
        here = self.rates.attention(CPU, layer.kv, self.use.host_types, host, threads, prefill=False)
        copied = whole + self._upload_rows(place, layer.kv, host, pinned=True)
        # What the CPU takes off a device that could hold all is less than these predictions' error: it is not counted,
        # so that a context that fits stays in one memory and no plan with less memory is predicted faster than that.
        return max(min(max(there, here) + self.rates.tier_split(place), copied), whole)

    def _host_cells(self, place: str, kv: LayerShape, seen: float, *, prefill: bool) -> float:
        """Of the cells that a token looks at, those in host memory; for a prompt the mean over its tokens."""
        tiers = self.context.tiers
        if place == CPU or tiers is None or kv.window:
            return 0.0
        if prefill:
            return max(self.use.depth - tiers.cells, 0) ** 2 / (2 * max(self.use.depth, 1))
        return max(seen - tiers.cells, 0.0)

    def _upload_rows(self, place: str, kv: LayerShape, cells: float, *, pinned: bool) -> float:
        return self.rates.upload(place, cells * kv.cell_bytes(*self.use.host_types), pinned)

    @property
    def fixed(self) -> float:
        """Seconds of a call beside its graph: the logits are copied out."""
        return _FIXED + 4 * self.work.n_vocab / 5e9


def total(
    costs: dict[str, list[PartCost]],
    places: Sequence[str],
    heavy_on_host: frozenset[int],
    crossings: dict[str, float],
) -> float:
    """Seconds of all layers with layer i at places[i], the heavy part of some of them on the CPU.

    `crossings`: the price of one change between CPU and that device; between two devices both are paid.
    """
    seconds, at = 0.0, CPU

    def move(to: str) -> float:
        if to == at:
            return 0.0
        return sum(crossings.get(place, 0.0) for place in (at, to))

    for index, place in enumerate(places):
        seconds += move(place)
        at = place
        cost = costs[place][index]
        seconds += cost.mixer + cost.cache
        if index in heavy_on_host and place != CPU:
            seconds += move(CPU)
            at = CPU
            seconds += costs[CPU][index].heavy
        else:
            seconds += cost.heavy
    return seconds + move(CPU)
