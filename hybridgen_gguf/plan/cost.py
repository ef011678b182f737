"""Predicts seconds: what each part of a model takes on each place (CPU or device), from measured rates. Pure.

A token that is written reads every active weight once and all K and V of its context once; a prompt does arithmetic
instead. On top come a fixed price of every operation and of every change between CPU and device.
Knows no bytes of memory and no budgets. Invariant: seconds are finite and above zero, and never fall with depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.rates import CPU, Product, Rates, Use
from ..model_file.layers import LayerShape
from ..model_file.shape import ModelShape
from ..model_file.types import row_bytes

OFFLOAD_TOKENS = 32  # from this many on, a GPU computes with weights it copies from the host (ggml-cuda: op_offload)
# Operations of a layer beside products, counted in graphs of Llama and Gemma: norm, rope of Q and K, two cache writes,
# attention, addition; norm, gate, addition. A product is two: activations are quantized, then all threads meet.
_NODES_MIXER, _NODES_FFN, _NODES_PRODUCT = 7, 3, 2
_CELL_STEP = 256
_FIXED = 150e-6  # seconds of one call of the decoder beside its graph: inputs, outputs, bookkeeping


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer in two parts that can lie apart.

    `mixer`: attention and whatever must stay with it; `heavy`: the FFN, or the experts, or the output matrix. `bytes_*`
    as stored; `heavy_names`: the tensors of the heavy part, without `blk.N.`.
    """

    mixer: tuple[Product, ...]
    heavy: tuple[Product, ...]
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
    """Seconds of a layer's parts at one place: weights of the mixer with its fixed costs, its cache, the heavy part."""

    mixer: float
    cache: float
    heavy: float


def work_of(shape: ModelShape) -> ModelWork:
    """The products of each layer, from the file's tensors."""
    share = min(shape.n_expert_used / shape.n_expert, 1.0) if shape.n_expert else 1.0
    experts = {group.layer for group in shape.groups if group.kind == "experts"}
    parts: dict[int, tuple[list[Product], list[Product], list[int], list[str]]] = {
        layer: ([], [], [0, 0], []) for layer in range(shape.n_layers + 1)
    }
    for tensor in shape.file.tensors:
        block, name = _block_of(tensor.name)
        if block is None:
            is_output = tensor.name.startswith("output") or (shape.tied_output and tensor.name == "token_embd.weight")
            if not is_output:
                continue
            block = shape.n_layers
        if block > shape.n_layers:
            continue
        mixer, heavy, sizes, names = parts[block]
        is_expert = "_exps" in name
        is_heavy = (
            len(tensor.shape) > 1 if block == shape.n_layers else is_expert if block in experts else _is_ffn(name)
        )
        sizes[is_heavy] += tensor.bytes
        if is_heavy:
            names.append(name)
        if len(tensor.shape) > 1 and tensor.shape[0] > 1:
            product = Product(tensor.type, math.prod(tensor.shape[1:]), tensor.shape[0], share if is_expert else 1.0)
            (heavy if is_heavy else mixer).append(product)
    layers = tuple(
        LayerWork(tuple(m), tuple(h), sizes[0], sizes[1], tuple(sorted(set(names))), _cache_of(shape, layer))
        for layer, (m, h, sizes, names) in parts.items()
    )
    return ModelWork(layers, shape.n_embd, shape.n_ff, shape.n_vocab)


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


class CostModel:
    """Seconds of a model's parts on a machine for one use."""

    def __init__(self, rates: Rates, work: ModelWork, use: Use) -> None:
        self.rates, self.work, self.use = rates, work, use

    def writing(self, place: str) -> list[PartCost]:
        """For each layer (the output last), the seconds that one written token takes at `place`."""
        threads = self.use.threads
        node = self.rates.node(place, threads)
        costs = []
        for layer in self.work.layers:
            mixer = sum(self.rates.matvec(place, product, threads) for product in layer.mixer)
            heavy = sum(self.rates.matvec(place, product, threads) for product in layer.heavy)
            cache = self._cache(place, layer, self.use.depth, threads, reading=False)
            small, large = _nodes(layer)
            costs.append(PartCost(mixer + small * node, cache, heavy + large * node))
        return costs

    def reading(self, place: str, gpu: str | None = None) -> list[PartCost]:
        """As `writing`, for each token of a prompt of `depth` tokens read from an empty context.

        `gpu`: a device that computes large batches with weights that lie on the host; they are copied for each batch.
        """
        threads, use = self.use.threads_batch, self.use
        batch = max(min(use.n_ubatch, use.depth), 1)
        node = self.rates.node(place, threads) / batch
        costs = []
        for index, layer in enumerate(self.work.layers):
            is_output = index == len(self.work.layers) - 1  # computed for the last token of a prompt alone
            mixer = sum(self._product(place, gpu, p, threads, batch) for p in layer.mixer)
            heavy = sum(self._product(place, gpu, p, threads, batch) for p in layer.heavy)
            if is_output:
                mixer, heavy = 0.0, heavy / max(use.depth, 1)
            else:
                mixer += self._elementwise(place, threads, 14 * self.work.n_embd)
                heavy += self._elementwise(place, threads, 4 * self.work.n_ff)
            cache = self._cache(place, layer, use.depth / 2, threads, reading=True)
            small, large = _nodes(layer)
            costs.append(PartCost(mixer + small * node, cache, heavy + large * node))
        return costs

    def _product(self, place: str, gpu: str | None, product: Product, threads: int, batch: int) -> float:
        seconds = self.rates.matmul(place, product, threads)
        if place != CPU or gpu is None or batch < OFFLOAD_TOKENS:
            return seconds
        # All of the host's copy crosses the link: with many tokens nearly every expert is used by one of them.
        size = product.rows * row_bytes(product.type, product.cols)
        return self.rates.matmul(gpu, product, 0) + self.rates.upload(gpu, size, not self.use.use_mmap) / batch

    def _elementwise(self, place: str, threads: int, values: int) -> float:
        return 12 * values / (self.rates.read_gbps(place, threads) * 1e9)  # two float32 read, one written

    def _cache(self, place: str, layer: LayerWork, cells: float, threads: int, *, reading: bool) -> float:
        if layer.kv is None:
            return 0.0
        seen = min(cells, layer.kv.window) if layer.kv.window else cells
        if not reading:  # the engine looks at whole steps of cells (llama_kv_cache: n_pad)
            seen = -(-(seen + 1) // _CELL_STEP) * _CELL_STEP
        cells, host = seen + 1, self._host_cells(place, layer.kv, seen, reading=reading)
        whole = self.rates.attention(place, layer.kv, self.use, cells, threads, reading=reading)
        batch = max(min(self.use.n_ubatch, self.use.depth), 1) if reading else 1
        if place != CPU and not self.use.kv_offload:  # the engine copies the rows to the device in every step
            return whole + self._upload_rows(place, layer.kv, cells, pinned=False) / batch
        if not host:
            return whole
        if reading:  # rows on the host cross the link once for each batch
            return whole + self._upload_rows(place, layer.kv, host, pinned=True) / batch
        there = self.rates.attention(place, layer.kv, self.use, max(cells - host, 1), threads, reading=False)
        here = self.rates.attention(CPU, layer.kv, self.use.host, host, threads, reading=False)
        copied = whole + self._upload_rows(place, layer.kv, host, pinned=True)
        # What the CPU takes off a device that could hold all is less than these predictions' error: it is not counted,
        # so that a context that fits stays in one memory and no plan with less memory is predicted faster than that.
        return max(min(max(there, here) + self.rates.tier_split(place), copied), whole)

    def _host_cells(self, place: str, kv: LayerShape, seen: float, *, reading: bool) -> float:
        """Of the cells that a token looks at, those in host memory; for a prompt the mean over its tokens."""
        if place == CPU or self.use.tier_cells is None or kv.window:
            return 0.0
        if reading:
            return max(self.use.depth - self.use.tier_cells, 0) ** 2 / (2 * max(self.use.depth, 1))
        return max(seen - self.use.tier_cells, 0.0)

    def _upload_rows(self, place: str, kv: LayerShape, cells: float, *, pinned: bool) -> float:
        use = self.use.host
        row = row_bytes(use.type_k, kv.n_head_kv * kv.head_k) + row_bytes(use.type_v, kv.n_head_kv * kv.head_v)
        return self.rates.upload(place, cells * row, pinned)

    @property
    def fixed(self) -> float:
        """Seconds of a call beside its graph: the logits are copied out."""
        return _FIXED + 4 * self.work.n_vocab / 5e9


@dataclass(frozen=True)
class Predicted:
    """Tokens a second at `depth` tokens of context: writing one more; reading a prompt of that length from empty."""

    decode_tps: float
    prompt_tps: float
    depth: int


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
