"""Measures this machine with the engine's own kernels: Hardware → Profile.

Rates by thread count: reading memory, products of each number format, attention, the price of a small operation; of
each device the same, its link to the CPU, and what handing work over costs; the disk. Takes less than MOST_SECONDS.
Knows no model and no plan. Invariant: no single measurement is begun once the time is up.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import HgError
from .hardware import Device, Disk, Hardware, KernelRate, Link, ThreadRate
from .profile import Profile, fingerprint_of
from .rates import (
    ATTENTION,
    FEW_CELLS,
    LONG_HEAD,
    LONG_ROW,
    MANY_CELLS,
    MATMUL,
    MATVEC,
    NODE,
    PREFILL_ATTENTION,
    SHORT_HEAD,
    SHORT_ROW,
)

MOST_SECONDS = 20.0
_SECONDS = MOST_SECONDS - 4  # a measurement that has begun is ended, and the engine must be loaded first
#: formats that most files are made of; of the others the planner takes the nearest
WEIGHT_TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "F16", "Q5_K", "Q4_1", "Q5_0", "IQ4_XS", "Q3_K", "Q2_K", "BF16", "F32")
CACHE_TYPES = ("F16", "Q8_0", "Q4_0")
_FEW_TYPES = 4  # for thread counts between one and all
_LONG_ROWS, _MOST_WEIGHTS, _MOST_CELLS = 1024, 192 << 20, 96 << 20
# 1,024 rows and 128 tokens show 0.45 and 0.1 of the rates that an H200 reaches in an 8B: a GPU wants a model's sizes.
_TIMES_ROWS_GPU, _TOKENS, _TOKENS_GPU = 8, 128, 512
_COPY = 64 << 20
_DISK_BYTES, _DISK_SECONDS = 256 << 20, 1.0

Progress = Callable[[str], None]


def measure(
    hardware: Hardware, *, model: Path | None = None, say: Progress = lambda _: None, seconds: float = _SECONDS
) -> Profile:
    """Measures everything. `model`: a file whose disk is read. Raises EngineError without an engine."""
    start, busy = time.monotonic(), busy_share()
    clock = _Budget(start + seconds)
    notes: list[str] = []
    counts = thread_counts(hardware.cpu.usable_threads)
    say("memory")
    read = _read_rates(counts)
    devices, links = [], []
    for device in hardware.devices:
        say(device.name)
        try:
            with_rates, link = _measure_device(device, clock)
        except HgError as error:
            notes.append(f"{device.name} was not measured: {error.what}")
            with_rates, link = device, Link(device.name)
        devices.append(with_rates)
        links.append(link)
    kernels: list[KernelRate] = []
    order = sorted(counts, key=lambda n: (n not in (1, counts[-1]), -n))  # those that matter most come first
    for index, threads in enumerate(order):
        left = max(start + seconds - time.monotonic(), 0)
        say(f"CPU, {threads} thread{'s' if threads > 1 else ''}; {left:.0f} s left")
        types = WEIGHT_TYPES if threads in (1, counts[-1]) else WEIGHT_TYPES[:_FEW_TYPES]
        share = clock.share(len(order) - index)
        kernels += _measure_kernels("CPU", threads, share, _cache_bytes(hardware), types)
    read = read or _read_from(kernels)
    say("disk")
    disk = _measure_disk(model, hardware.disk)
    if time.monotonic() - start > seconds:
        notes.append("time ran out before everything was measured: the machine was busy")
    found = replace(
        hardware,
        cpu=replace(hardware.cpu, kernels=tuple(kernels)),
        memory=replace(hardware.memory, read=read),
        devices=tuple(devices),
        links=tuple(links),
        disk=disk,
        notes=(*hardware.notes, *notes),
    )
    busy = max(busy, busy_share() if busy > 0.1 else 0.0)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Profile(fingerprint_of(hardware), now, round(time.monotonic() - start, 2), round(busy, 3), found)


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return tuple(sorted({*counts, most}))


def busy_share() -> float:
    """Share of the CPUs in use by others over 0.2 s in which this process sleeps; 0 where that can't be read."""
    try:
        import psutil
    except ImportError:
        return 0.0
    return float(psutil.cpu_percent(0.2)) / 100


class _Budget:
    """Time that a profile has; once it is spent, everything is measured once and briefly, or left out."""

    def __init__(self, end: float) -> None:
        self._end = end
        self.now = time.perf_counter

    def over(self) -> bool:
        return time.monotonic() > self._end

    def share(self, parts: int) -> _Budget:
        """The first of `parts` equal parts of what is left."""
        now = time.monotonic()
        return _Budget(now + max(self._end - now, 0.0) / parts)

    def typical(self, run: Callable[[], None] | None, repeats: int = 4, seconds: float = 0.04) -> float | None:
        """Median seconds of a few runs after a warm-up: a model runs long enough to meet the machine as it mostly is.

        While median and best are far apart there are more runs: one core taken away stalls all threads of a run, and on
        an H200's host one such rate, a twentieth of the true one, had the planner keep attention off the CPU.
        """
        if run is None or self.over():
            return None
        run()
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < (repeats if _agree(times) else 4 * repeats) or (
            time.perf_counter() - start < seconds and len(times) < 50
        ):
            begin = self.now()
            run()
            times.append(self.now() - begin)
            if time.perf_counter() - start > (4 if _agree(times) else 16) * seconds and len(times) > 1:
                break
        return max(statistics.median_low(times), 1e-9)


def _agree(times: list[float]) -> bool:
    """Whether the median is within a third of the best."""
    return len(times) > 1 and statistics.median_low(times) < 1.33 * min(times)


def _cache_bytes(hardware: Hardware) -> int:
    return max((cache.size for cache in hardware.cpu.caches), default=32 << 20)


def _read_rates(counts: tuple[int, ...]) -> tuple[ThreadRate, ...]:
    """Empty on an engine that cannot measure it: then the fastest product stands in."""
    from ..engine.graphs.attention import read_bandwidth

    try:
        return tuple(ThreadRate(n, round(read_bandwidth(n, 256 << 20, 3) / 1e9, 2)) for n in counts)
    except HgError:
        return ()


def _read_from(kernels: list[KernelRate]) -> tuple[ThreadRate, ...]:
    best: dict[int, float] = {}
    for rate in kernels:
        if rate.operation == MATVEC:
            best[rate.threads] = max(best.get(rate.threads, 0.0), rate.gbps)
    return tuple(ThreadRate(threads, gbps) for threads, gbps in sorted(best.items()))


def _measure_kernels(
    place: str, threads: int, clock: _Budget, cache: int, types: tuple[str, ...] = WEIGHT_TYPES, *, gpu: bool = False
) -> list[KernelRate]:
    """All rates of a place with so many threads. `cache`: bytes of the largest; four times as many come from memory."""
    from ..engine.graphs.kernels import Kernels

    # One thread's own time leaves out what other processes took meanwhile; several threads wait for each other.
    clock.now = time.thread_time if threads == 1 else time.perf_counter
    with Kernels(place) as kernels:
        if place == "CPU":
            kernels.set_threads(threads)
        found = list(_small_operations(kernels, threads, clock))
        for kind in CACHE_TYPES:
            found += _attentions(kernels, kind, threads, clock, min(4 * cache, _MOST_CELLS))
        for kind in types:
            found += _products(kernels, kind, threads, clock, weights=min(4 * cache, _MOST_WEIGHTS), gpu=gpu)
    return found


def _small_operations(kernels: Any, threads: int, clock: _Budget) -> Iterator[KernelRate]:
    few, many = (clock.typical(kernels.graph(count)) for count in (100, 1100))
    if few is not None and many is not None:
        seconds = max((many - few) / 1000, 1e-8)
        yield KernelRate(NODE, "", threads, 0.0, _rounded(1e-9 / seconds))


def _products(
    kernels: Any, kind: str, threads: int, clock: _Budget, *, weights: int, gpu: bool
) -> Iterator[KernelRate]:
    from ..engine.graphs.kernels import Matrices

    for suffix, cols in (("", LONG_ROW), ("-short", SHORT_ROW)):
        rows = _LONG_ROWS * LONG_ROW // cols * (_TIMES_ROWS_GPU if gpu else 1)
        one = Matrices(kind, rows, cols, 1, 1)
        work = replace(one, copies=max(weights // one.bytes, 2))
        seconds = clock.typical(kernels.graph(work))
        if seconds is not None:
            yield KernelRate(MATVEC + suffix, kind, threads, _rounded(work.bytes / seconds / 1e9),
                             _rounded(work.flops / seconds / 1e9))  # fmt: skip
        batch = Matrices(kind, rows // 2, cols, _TOKENS_GPU if gpu else _TOKENS, 1 if threads < 4 else 2)
        seconds = clock.typical(kernels.graph(batch), 3)
        if seconds is not None:
            yield KernelRate(MATMUL + suffix, kind, threads, _rounded(batch.bytes / seconds / 1e9),
                             _rounded(batch.flops / seconds / 1e9))  # fmt: skip


def _attentions(kernels: Any, kind: str, threads: int, clock: _Budget, stored: int) -> Iterator[KernelRate]:
    """Rates by cells and by head size; one run reads `stored` bytes of K and V at least, more than a cache holds."""
    from ..engine.graphs.kernels import AttentionNodes

    works = {PREFILL_ATTENTION: AttentionNodes(kind, FEW_CELLS, 64, 8, 2, LONG_HEAD, 1)}
    sizes = ((FEW_CELLS, "", 32, LONG_HEAD), (MANY_CELLS, "", 32, LONG_HEAD), (FEW_CELLS, "-short", 16, SHORT_HEAD))
    for cells, suffix, heads, size in sizes:
        one = AttentionNodes(kind, cells, 1, heads, heads // 4, size, 1)
        works[f"{ATTENTION}-{cells}{suffix}"] = replace(one, copies=max(-(-stored // one.bytes), 2))
    for operation, work in works.items():
        seconds = clock.typical(kernels.graph(work), 3)
        if seconds is not None:
            yield KernelRate(operation, kind, threads, _rounded(work.bytes / seconds / 1e9),
                             _rounded(work.flops / seconds / 1e9))  # fmt: skip


def _measure_device(device: Device, clock: _Budget) -> tuple[Device, Link]:
    from ..engine.graphs.kernels import Kernels

    kernels = _measure_kernels(device.name, 0, clock, 64 << 20, gpu=device.kind == "gpu")
    best = max((rate.gbps for rate in kernels if rate.operation == MATVEC), default=0.0)
    with Kernels(device.name) as on_device, Kernels("CPU") as on_cpu:
        launch = clock.typical(on_device.graph(1), 20)
        split = clock.typical(_handing_over(on_device, on_cpu), 20)
    link = Link(device.name, split_s=split, **_link_rates(device.name, clock))
    return replace(device, read_gbps=best or None, launch_s=launch, kernels=tuple(kernels)), link


def _handing_over(on_device: Any, on_cpu: Any) -> Callable[[], None] | None:
    """Device → CPU → device with the vector that one token needs: what a layer's split costs beside its work."""
    there, here = on_device.graph(1, kept=True), on_cpu.graph(1, kept=True)
    copies = on_device.copies(16 << 10, pinned=True) or on_device.copies(16 << 10, pinned=False)
    if there is None or here is None or copies is None:
        return None
    upload, download = copies

    def run() -> None:
        there()
        download()
        here()
        upload()

    return run


def _link_rates(device: str, clock: _Budget) -> dict[str, float | None]:
    from ..engine.graphs.kernels import Kernels

    rates: dict[str, float | None] = {}
    for pinned, suffix in ((True, "_pinned_gbps"), (False, "_gbps")):
        with Kernels(device) as kernels:
            copies = kernels.copies(_COPY, pinned)
            for name, copy in zip(("to_device", "from_device"), copies or (None, None), strict=True):
                seconds = clock.typical(copy, 3)
                rates[name + suffix] = None if seconds is None else _rounded(_COPY / seconds / 1e9)
    return rates


def _measure_disk(model: Path | None, known: Disk | None) -> Disk | None:
    """Reads part of the model's file (or of a temporary one) that the page cache was asked to forget."""
    if model is not None:
        return _disk_rate(model, known)
    with tempfile.NamedTemporaryFile(prefix="hgguf-disk-") as file:
        block = os.urandom(1 << 20)
        for _ in range(64):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _disk_rate(Path(file.name), known)


def _disk_rate(path: Path, known: Disk | None) -> Disk | None:
    from .probe import read_disk

    disk = read_disk(path.parent) or known
    if disk is None or not hasattr(os, "posix_fadvise"):
        return disk
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, size = time.perf_counter(), 0
        while size < _DISK_BYTES and time.perf_counter() - start < _DISK_SECONDS:
            block = file.read(4 << 20)
            if not block:
                break
            size += len(block)
        seconds = time.perf_counter() - start
    return replace(disk, read_gbps=_rounded(size / seconds / 1e9)) if size and seconds > 0 else disk


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
