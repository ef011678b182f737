"""Rates of a machine, looked up by place, operation, number format and thread count. Pure.

The rates are those that a profile measured with the engine's own kernels (`Hardware.cpu.kernels`, `Device.kernels`,
`Link`). What was not measured takes the nearest that was; where nothing was, nominal rates stand in that only serve to
compare placements (`Rates.measured` is then False).
Knows no model. Invariant: every answer is finite and above zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from ..model_file.layers import LayerShape
from ..model_file.types import ggml_type, row_bytes
from .hardware import Hardware, KernelRate

CPU = "CPU"
SHORT_ROW, LONG_ROW = 512, 4096  # columns of the two matrices that a profile measures for each type
FEW_CELLS, MANY_CELLS = 1024, 8192  # cells of the attentions that it measures
SHORT_HEAD, LONG_HEAD = 64, 128  # and the sizes of their heads; the short ones over few cells alone
#: operations of a profile: `node` is a tiny operation, its gflops are 1e9 operations a second
MATVEC, MATMUL, ATTENTION, PREFILL_ATTENTION, NODE = "matvec", "matmul", "attention", "attention-prompt", "node"
# Nominal rates for comparing placements where nobody measured: a desktop CPU and a middling card on PCIe 4.
_NOMINAL_CPU_GBPS, _NOMINAL_CPU_MOST, _NOMINAL_CPU_GFLOPS = 9.0, 45.0, 30.0
_NOMINAL_GPU_GBPS, _NOMINAL_GPU_GFLOPS, _NOMINAL_LINK_GBPS = 350.0, 15000.0, 12.0
_NOMINAL_NODE, _NOMINAL_NODE_GPU, _NOMINAL_SPLIT = 1e-6, 3e-6, 150e-6

# Lowest credible attention rate over many cells, as a share of that over few. A larger drop means that another process
# disturbed the measurement.
_LEAST_AT_DEPTH = 0.2
# Times what a profile measures for handing work over (0.041 ms on an H200): a layer with host cells costs 0.08 ms there
# beside its attention, one whose FFN is on the CPU 0.10 ms beside its products.
_TIER_SPLIT, _HEAVY_SPLIT = 2.0, 2.5


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices that multiply one token: `rows` rows of `cols` in all, of which a token uses `share`."""

    type: str
    rows: int
    cols: int
    share: float = 1.0


class Rates:
    """Rates of a machine, looked up by what is asked. `measured`: from a profile; otherwise nominal."""

    def __init__(self, hardware: Hardware) -> None:
        self._tables: dict[tuple[str, str], dict[str, dict[int, KernelRate]]] = {}
        for place, kernels in ((CPU, hardware.cpu.kernels), *((d.name, d.kernels) for d in hardware.devices)):
            for rate in kernels:
                self._tables.setdefault((place, rate.operation), {}).setdefault(rate.type, {})[rate.threads] = rate
        self._devices = {device.name: device for device in hardware.devices}
        self._links = {link.device: link for link in hardware.links}
        self._read = {rate.threads: rate.gbps for rate in hardware.memory.read}
        if not self._read:  # then the fastest product stands in
            for rate in (rate for rate in hardware.cpu.kernels if rate.operation == MATVEC):
                self._read[rate.threads] = max(self._read.get(rate.threads, 0.0), rate.gbps)
        self.measured = bool(hardware.cpu.kernels)
        self._find = lru_cache(maxsize=None)(self._find_uncached)

    def thread_counts(self) -> tuple[int, ...]:
        """Thread counts that were measured on the CPU."""
        by_type = self._tables.get((CPU, MATVEC), {})
        return tuple(sorted({threads for table in by_type.values() for threads in table}))

    def matvec(self, place: str, product: Product, threads: int) -> float:
        """Seconds for one token."""
        rows = product.rows * product.share
        short = self._find(place, f"{MATVEC}-short", product.type, threads)
        long = self._find(place, MATVEC, product.type, threads)
        if long is None:
            return rows * row_bytes(product.type, product.cols) / (self._nominal_gbps(place, threads) * 1e9)
        kind = long.type
        scale = ggml_type(product.type).bits / ggml_type(kind).bits
        at_long = row_bytes(kind, LONG_ROW) / long.gbps
        at_short = row_bytes(kind, SHORT_ROW) / short.gbps if short else at_long * SHORT_ROW / LONG_ROW
        seconds = rows * _line(SHORT_ROW, at_short, LONG_ROW, at_long, product.cols) * scale * 1e-9
        if place != CPU:
            return seconds
        # A profile's weights may lie in a cache (300 MB on some servers); a model's come from memory.
        return max(seconds, rows * row_bytes(product.type, product.cols) / (self.read_gbps(CPU, threads) * 1e9))

    def matmul(self, place: str, product: Product, threads: int) -> float:
        """Seconds for each token of a large batch."""
        rows = product.rows * product.share
        short = self._find(place, f"{MATMUL}-short", product.type, threads)
        long = self._find(place, MATMUL, product.type, threads)
        if long is None:
            return 2 * rows * product.cols / (self._nominal_gflops(place, threads) * 1e9)
        at_long = 2 * LONG_ROW / long.gflops
        at_short = 2 * SHORT_ROW / short.gflops if short else at_long * SHORT_ROW / LONG_ROW
        return rows * _line(SHORT_ROW, at_short, LONG_ROW, at_long, product.cols) * 1e-9

    def attention(
        self, place: str, layer: LayerShape, types: tuple[str, str], cells: float, threads: int, *, prefill: bool
    ) -> float:
        """Seconds of one query token over `cells` cells of `types` (K, V). `prefill`: as one of many in a prompt."""
        flops = 2 * cells * layer.n_head * (layer.head_k + (layer.head_v or layer.head_k))
        stored, kind = cells * layer.cell_bytes(*types), types[0].upper()
        if prefill:
            rate = self._find(place, PREFILL_ATTENTION, kind, threads)
            return flops / ((rate.gflops if rate else self._nominal_gflops(place, threads) / 3) * 1e9)
        few = self._find(place, f"{ATTENTION}-{FEW_CELLS}", kind, threads)
        many = self._find(place, f"{ATTENTION}-{MANY_CELLS}", kind, threads)
        if few is None or many is None:
            return stored / (self._nominal_gbps(place, threads) * 0.5e9)
        by_head = self._by_head(place, few, kind, layer.head_k, threads)
        if place != CPU and cells > FEW_CELLS and many.gflops > few.gflops:  # more cells occupy a GPU better
            share = min(math.log(cells / FEW_CELLS) / math.log(MANY_CELLS / FEW_CELLS), 1.0)
            few = replace(few, gflops=few.gflops * (many.gflops / few.gflops) ** share)
        gflops = _by_depth(few.gflops, max(many.gflops, few.gflops * _LEAST_AT_DEPTH), cells)
        return max(flops / (gflops * by_head * 1e9), stored / (self.read_gbps(place, threads) * 1e9))

    def _by_head(self, place: str, long: KernelRate, kind: str, size: int, threads: int) -> float:
        """The rate of heads of `size` as a share of long ones: part of the work is the same for a head of any size."""
        short = self._find(place, f"{ATTENTION}-{FEW_CELLS}-short", kind, threads)
        if short is None:
            return 1.0
        at_long = LONG_HEAD / long.gflops
        at_short = min(SHORT_HEAD / short.gflops, 0.75 * at_long)
        return size / (_line(SHORT_HEAD, at_short, LONG_HEAD, at_long, size) * long.gflops)

    def read_gbps(self, place: str, threads: int) -> float:
        """Bytes that can be read of the place's memory at most."""
        if place != CPU:
            device = self._devices.get(place)
            return (device.read_gbps if device else None) or _NOMINAL_GPU_GBPS
        return _between(self._read, threads) if self._read else self._nominal_gbps(CPU, threads)

    def node(self, place: str, threads: int) -> float:
        """Seconds of an operation too small to matter otherwise."""
        rate = self._find(place, NODE, "", threads)
        if rate is not None and rate.gflops > 0:
            return 1e-9 / rate.gflops
        return _NOMINAL_NODE if place == CPU else _NOMINAL_NODE_GPU

    def crossing(self, device: str) -> float:
        """Seconds of one change between CPU and device, either way."""
        link = self._links.get(device)
        return (_HEAVY_SPLIT * link.split_s if link and link.split_s else _NOMINAL_SPLIT) / 2

    def tier_split(self, device: str) -> float:
        """Seconds that a layer with host cells costs beside the attention to them."""
        return _TIER_SPLIT / _HEAVY_SPLIT * 2 * self.crossing(device)

    def upload(self, device: str, size: float, pinned: bool) -> float:
        """Seconds to copy `size` bytes to the device."""
        link = self._links.get(device)
        gbps = (link.to_device_pinned_gbps if pinned else link.to_device_gbps) if link else None
        return size / ((gbps or _NOMINAL_LINK_GBPS) * 1e9)

    def computes_host_weights(self, device: str) -> bool:
        """Whether large batches go to this device even where the weights lie on the host."""
        found = self._devices.get(device)
        return found is not None and found.kind == "gpu"

    def devices(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def free(self) -> dict[str, int]:
        """Bytes free on each device."""
        return {name: device.memory_free for name, device in self._devices.items()}

    def buffer_types(self) -> dict[str, str]:
        """The device of each buffer type."""
        return {device.buffer_type or name: name for name, device in self._devices.items()}

    def is_measured(self, place: str) -> bool:
        """Whether products were measured there."""
        return (place, MATVEC) in self._tables

    def _nominal_gbps(self, place: str, threads: int) -> float:
        if place != CPU:
            return self.read_gbps(place, 0) * 0.7
        return min(_NOMINAL_CPU_GBPS * threads, _NOMINAL_CPU_MOST)

    def _nominal_gflops(self, place: str, threads: int) -> float:
        return _NOMINAL_CPU_GFLOPS * threads if place == CPU else _NOMINAL_GPU_GFLOPS

    def _find_uncached(self, place: str, operation: str, kind: str, threads: int) -> KernelRate | None:
        """The rate of this type, or of the measured type with the nearest bits; between thread counts, interpolated."""
        by_type = self._tables.get((place, operation))
        if not by_type:
            return None
        if kind not in by_type:
            bits = ggml_type(kind).bits
            kind = min(by_type, key=lambda name: (abs(math.log(ggml_type(name).bits / bits)), name))
        table = by_type[kind]
        gbps = _between({t: rate.gbps for t, rate in table.items()}, threads)
        gflops = _between({t: rate.gflops for t, rate in table.items()}, threads)
        return KernelRate(operation, kind, threads, gbps, gflops)


def _between(table: dict[int, float], at: int) -> float:
    """Linear between the neighbours; the nearest one outside."""
    known = sorted(table)
    index = bisect_left(known, at)
    if index == len(known):
        return table[known[-1]]
    if known[index] == at or index == 0:
        return table[known[index]]
    low, high = known[index - 1], known[index]
    return table[low] + (table[high] - table[low]) * (at - low) / (high - low)


def _line(x0: int, y0: float, x1: int, y1: float, x: float) -> float:
    """A row's seconds: a fixed part and one for each column, neither below zero."""
    slope = max((y1 - y0) / (x1 - x0), y1 / x1 * 0.5)
    return max(y0 - slope * x0, 0.0) + slope * x


def _by_depth(few: float, many: float, cells: float) -> float:
    """Between two depths on a logarithmic scale; beyond them the nearer one, and falling on where it was falling."""
    if cells <= FEW_CELLS or few <= 0 or many <= 0:
        return few
    slope = min(math.log(many / few) / math.log(MANY_CELLS / FEW_CELLS), 0.0) if many < few else 0.0
    # A time must not fall with depth: the rate may fall at most, and as fast as 1/cells at least stays monotone.
    return few * math.pow(cells / FEW_CELLS, max(slope, -1.0))
