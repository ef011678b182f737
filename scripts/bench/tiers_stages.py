"""Measures decode and prompt speed of KV in two tiers against one memory, on the device that the engine finds first.

    python tiers_stages.py MODEL.gguf [STAGE ...] [--depth 32768] [--threads 16]

Stages: bandwidth; cpu (the model wholly on the CPU, matrix products fast and stock); prompt (micro-batches of 512 to
4,096 tokens); f16 and q8_0 (32,768 tokens, a quarter of the KV on the device, against stock); border (the same with a
share of the host cells, or all, copied to the device); overlap (both parts alone and together); details (contexts that
fit, the fixed cost of a layer); long (131,072 tokens). One JSON line a measurement: a run that is cut off keeps what it
has. Caches are filled once with all on the device; each configuration restores that state, which does not depend on
where cells lie.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# the engine before numpy: with NumPy 2.5 loaded first, one library crashed while it loaded a model
from hybridgen_gguf.engine.graphs.attention import read_bandwidth
from hybridgen_gguf.engine.handles import Model, start
from hybridgen_gguf.engine.tiers import Tiers, counters, pending
from hybridgen_gguf.errors import EngineError
from hybridgen_gguf.settings import KV_TYPES, ModelSettings

import numpy as np  # isort: skip

CHUNK = 2048
Place = dict[str, Any]


class Bench:
    def __init__(self, path: Path, threads: int) -> None:
        self.library = start()
        self.path, self.threads = path, threads
        self.models: dict[int, Model] = {}
        self.states: dict[tuple[str, int], Any] = {}
        self.tokens = [int(t) for t in np.random.default_rng(0).integers(1000, 30000, 1 << 18)]

    def say(self, what: str, **facts: Any) -> None:
        print(json.dumps({"what": what, **facts}), flush=True)

    def model(self, ngl: int) -> Model:
        if ngl not in self.models:
            for old in self.models.values():
                old.close()
            self.models = {ngl: Model(self.path, ModelSettings(n_gpu_layers=ngl))}
        return self.models[ngl]

    @contextmanager
    def context(
        self,
        n_ctx: int,
        kv: str,
        tiers: Tiers | None = None,
        ngl: int = 99,
        offload: bool = True,
        ubatch: int = 512,
        threads: int | None = None,
    ) -> Iterator[Any]:
        model = self.model(ngl)
        api = model.api
        p = api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx, max(CHUNK, ubatch), ubatch
        p.type_k = p.type_v = KV_TYPES[kv]
        p.offload_kqv, p.flash_attn_type = offload, 1
        p.n_threads = p.n_threads_batch = threads or self.threads
        with pending(self.library, tiers) as asked:
            handle = api.llama_init_from_model(model.handle, p)
        if not handle:
            raise RuntimeError(f"no context: {asked.note}")
        try:
            yield handle
        finally:
            api.llama_free(handle)

    def feed(self, handle: Any, tokens: list[int]) -> None:
        api = self.library.api
        buffer = (api.llama_token * len(tokens))(*tokens)
        most = int(api.llama_n_batch(handle))
        for i in range(0, len(tokens), most):
            part = ctypes.cast(ctypes.byref(buffer, 4 * i), ctypes.POINTER(api.llama_token))
            if api.llama_decode(handle, api.llama_batch_get_one(part, min(most, len(tokens) - i))) != 0:
                raise RuntimeError("llama_decode failed")
        api.llama_synchronize(handle)

    def fill(self, handle: Any, kv: str, depth: int) -> None:
        """Restores the state of this depth; the first time it is made, on this context: all on the device, please."""
        api = self.library.api
        if depth == 0:
            return
        if (kv, depth) in self.states:
            data, size = self.states[kv, depth]
            if api.llama_state_set_data(handle, data, size) == 0:
                raise RuntimeError("the state was refused")
            return
        t = time.perf_counter()
        self.feed(handle, self.tokens[:depth])
        self.say("fill", kv=kv, depth=depth, prompt_tps=round(depth / (time.perf_counter() - t), 1))
        size = api.llama_state_get_size(handle)
        data = (ctypes.c_uint8 * size)()
        self.states[kv, depth] = (data, api.llama_state_get_data(handle, data, size))

    def decode(
        self,
        what: str,
        kv: str,
        depth: int,
        steps: int = 16,
        n_ctx: int | None = None,
        keep: int | None = None,
        **place: Any,
    ) -> float:
        """Median seconds a token. `keep`: only the first tokens of the state stay."""
        with self.context(n_ctx or depth + 256, kv, **place) as handle:
            self.fill(handle, kv, depth)
            if keep is not None:
                self.library.api.llama_memory_seq_rm(self.library.api.llama_get_memory(handle), 0, keep, -1)
            self.feed(handle, [17])
            self.feed(handle, [18])
            before = counters(self.library, handle)
            times = []
            for i in range(steps):
                t = time.perf_counter()
                self.feed(handle, [100 + i])
                times.append(time.perf_counter() - t)
            after = counters(self.library, handle)
        median = float(np.median(times))
        facts: dict[str, Any] = {"kv": kv, "depth": depth if keep is None else keep}
        facts |= {"ms": round(median * 1e3, 3), "tps": round(1 / median, 2)}
        if before and after:
            n = after.steps - before.steps
            facts |= {
                "cells_device": after.cells_device,
                "cells_host": after.cells_host,
                "pinned": after.pinned,
                "huge": after.huge_pages,
                "cpu_ms": round((after.cpu_s - before.cpu_s) / n * 1e3, 3),
                "wait_ms": round((after.wait_s - before.wait_s) / n * 1e3, 3),
                "host_gb": round((after.bytes_host - before.bytes_host) / n / 1e9, 3),
                "streamed_gb": round((after.bytes_streamed - before.bytes_streamed) / n / 1e9, 3),
                "head_starts": (after.head_starts - before.head_starts) // n,
            }
        self.say(what, **facts, **{k: v if not isinstance(v, Tiers) else vars(v) for k, v in place.items()})
        return median

    def switch(self, name: str, value: str) -> None:
        self.library.set_switch(name, value)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """The CPU attention of the stock engine, where this engine has another."""
        names = {s.name for s in self.library.switches()}
        if "cpu-attention" in names:
            self.switch("cpu-attention", "stock")
        yield
        if "cpu-attention" in names:
            self.switch("cpu-attention", "fast")


def share(depth: int, part: float) -> int:
    return int(depth * part) // 256 * 256


def budget(b: Bench, kv: str, depth: int, layers: tuple[int, ...]) -> None:
    """Point 1: a quarter of the KV on the device, against what stock does with the same bytes."""
    all_gpu = b.decode("all on the device", kv, depth)
    for threads in sorted({b.threads, max(1, b.threads - 1), max(1, b.threads // 2)}):
        b.decode("tiers 25 %", kv, depth, tiers=Tiers(share(depth, 0.25)), threads=threads)
    with b.stock():
        b.decode("stock -nkvo", kv, depth, steps=6, offload=False)
        for ngl in layers:
            b.decode(f"stock -ngl {ngl}", kv, depth, steps=6, ngl=ngl)
    b.model(99)
    b.say("ratio", kv=kv, depth=depth, all_gpu_ms=round(all_gpu * 1e3, 3))


def details(b: Bench, depth: int) -> None:
    """Points 3 and 5, in f16."""
    kv = "f16"
    for at in (0, depth):
        n_ctx = depth + 256
        stock = b.decode("fits, one memory", kv, at, 32, n_ctx)
        tiered = b.decode("fits, tiers unused", kv, at, 32, n_ctx, tiers=Tiers(n_ctx))
        b.say("fits", depth=at, ratio=round(stock / tiered, 4))

    few = b.decode("tiers, 256 host cells", kv, depth, 32, tiers=Tiers(depth - 256))
    none = b.decode("tiers, no host cell", kv, depth, 32, tiers=Tiers(depth + 256))
    b.say("fixed cost of a layer", ms=round((few - none) / 32 * 1e3, 4))


def border(b: Bench, depth: int, kinds: tuple[str, ...] = ("f16", "q8_0")) -> None:
    """Host cells with one token: all on the CPU, all on the device after a copy, and shares copied meanwhile."""
    for kv in kinds:
        milliseconds = {}
        for share_ in (0.0, 0.2, 0.4, 0.6, 1.0):
            tiers = Tiers(share(depth, 0.25), cpu_tokens=0 if share_ == 1 else 8, share=share_)
            milliseconds[f"{share_:.1f} copied"] = round(
                1e3 * b.decode("share of host cells", kv, depth, tiers=tiers), 3
            )
        gb = per_cell(b, kv) * (depth - share(depth, 0.25)) / 1e9
        b.say(
            "border", kv=kv, ms=milliseconds, host_gb=round(gb, 3), best_tps=round(1e3 / min(milliseconds.values()), 2)
        )


def per_cell(b: Bench, kv: str) -> float:
    """Bytes of K and V of one cell, all layers."""
    with b.context(512, kv, tiers=Tiers(256)) as handle:
        found = counters(b.library, handle)
    assert found is not None
    return found.size_host_bytes / (found.size_host + 1)


def overlap(b: Bench, depth: int) -> None:
    """Point 6, in f16: is decoding faster than host part and device part alone by 0.8 of the smaller one?

    Host part: a step with the same host cells and 256 on the device. Device part: what a step with the device's cells
    alone takes longer than one with 256. At 25 % on the device, and at a split where both take about the same time.
    """
    few = b.decode("256 cells on the device", "f16", depth, 32, keep=256, tiers=Tiers(depth + 256))
    for on_host in (max(256, share(depth, 0.04)), depth - share(depth, 0.25)):
        on_device = depth - on_host
        alone = b.decode("device cells alone", "f16", depth, 32, keep=on_device, tiers=Tiers(depth + 256))
        host = b.decode("host cells, 256 on the device", "f16", depth, 32, keep=256 + on_host, tiers=Tiers(256))
        both = b.decode("both", "f16", depth, 32, tiers=Tiers(on_device))
        device_part, host_part = alone - few, host - few
        smaller = min(device_part, host_part)
        hidden = (device_part + host_part - (both - few)) / smaller if smaller > 0 else 0.0
        b.say(
            "overlap",
            cells_device=on_device,
            cells_host=on_host,
            rest_ms=round(few * 1e3, 3),
            device_ms=round(device_part * 1e3, 3),
            host_ms=round(host_part * 1e3, 3),
            both_ms=round((both - few) * 1e3, 3),
            hidden=round(hidden, 3),
        )


def prompt(b: Bench, depth: int) -> None:
    """Point 4: tokens a second by micro-batch, the better of two runs each, alternating; and once without prefetch."""
    quarter = Tiers(share(depth, 0.25))
    ways = (("all on the device", None, "on"), ("tiers 25 %", quarter, "on"))
    for ubatch in (512, 1024, 2048, 4096):
        rates: dict[str, float] = {}
        for name, tiers, prefetch in (*ways, *ways, ("without prefetch", quarter, "off")):
            b.switch("kv-prefetch", prefetch)
            with b.context(depth + 256, "f16", tiers=tiers, ubatch=ubatch) as handle:
                t = time.perf_counter()
                b.feed(handle, b.tokens[:depth])
                rates[name] = max(rates.get(name, 0.0), depth / (time.perf_counter() - t))
        b.switch("kv-prefetch", "on")
        ratio = round(rates["tiers 25 %"] / rates["all on the device"], 3)
        b.say("prompt", depth=depth, ubatch=ubatch, **{k: round(v, 1) for k, v in rates.items()}, ratio=ratio)


def bandwidth(b: Bench) -> None:
    """What the cores can read, where the engine can tell: the limit is host bytes over this."""
    for threads in sorted({b.threads, b.threads // 2}):
        try:
            speed = read_bandwidth(threads, 4 << 30)
        except EngineError:
            return
        b.say("read bandwidth", threads=threads, gbps=round(speed / 1e9, 1))


def cpu(b: Bench) -> None:
    """All weights on the CPU: prompts of 512 tokens and decode, our matrix products and the stock ones in turns."""
    rates: dict[tuple[str, str], list[float]] = {}
    for side in ("fast", "stock", "fast", "stock"):
        b.switch("cpu-matrix", side)  # it counts when a model is loaded
        for old in b.models.values():
            old.close()
        b.models.clear()
        with b.context(1024, "f16", ngl=0) as handle:
            b.feed(handle, b.tokens[:64])  # the weights come into memory
            for what, tokens, times in (("prompt", 512, 1), ("decode", 1, 16)):
                b.library.api.llama_memory_clear(b.library.api.llama_get_memory(handle), True)
                t = time.perf_counter()
                for i in range(times):
                    b.feed(handle, b.tokens[i : i + tokens])
                rates.setdefault((what, side), []).append(tokens * times / (time.perf_counter() - t))
    b.switch("cpu-matrix", "fast")
    b.models = {}
    for what in ("prompt", "decode"):
        fast, stock = (float(np.median(rates[what, side])) for side in ("fast", "stock"))
        b.say("cpu", test=what, fast_tps=round(fast, 2), stock_tps=round(stock, 2), ratio=round(fast / stock, 3))


def long(b: Bench, depth: int) -> None:
    """Point 2."""
    b.states.clear()
    b.decode("all on the device", "f16", depth, 8)
    b.decode("tiers 25 %", "f16", depth, 8, tiers=Tiers(share(depth, 0.25)))
    b.decode("tiers 25 %", "f16", depth, 8, tiers=Tiers(share(depth, 0.25), share=0.4))
    b.states.clear()


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("model", type=Path)
    a.add_argument("stages", nargs="*", default=[])
    a.add_argument("--depth", type=int, default=32768)
    a.add_argument("--long-depth", type=int, default=131072)
    a.add_argument("--threads", type=int, default=16)
    a.add_argument("--rpc", metavar="HOST:PORT", help="a server to use as the device, to try the script without a GPU")
    o = a.parse_args()
    os.environ.setdefault("HGGUF_MEMORY_CHECK", "off")  # a rented machine's memory may grow with its use
    if o.rpc:
        start().add_rpc(o.rpc)
    b = Bench(o.model, o.threads)
    b.say(
        "engine",
        commit=b.library.commit,
        patches=b.library.patches,
        devices=[d.description for d in b.library.devices()],
    )
    stages: dict[str, Callable[[], None]] = {
        "bandwidth": lambda: bandwidth(b),
        "cpu": lambda: cpu(b),
        "prompt": lambda: prompt(b, o.depth),
        "f16": lambda: budget(b, "f16", o.depth, (20,)),
        "overlap": lambda: overlap(b, o.depth),
        "border": lambda: border(b, o.depth),
        "q8_0": lambda: budget(b, "q8_0", o.depth, (26,)),
        "details": lambda: details(b, o.depth),
        "long": lambda: long(b, o.long_depth),
    }
    unknown = [name for name in o.stages if name not in stages]
    if unknown:
        a.error(f"no stage {unknown[0]}; there are {', '.join(stages)}")
    for name, stage in stages.items():
        if not o.stages or name in o.stages:
            t = time.perf_counter()
            try:
                stage()
            except RuntimeError as error:
                b.say("failed", stage=name, error=str(error))
            b.say("stage", name=name, seconds=round(time.perf_counter() - t, 1))


if __name__ == "__main__":
    main()
