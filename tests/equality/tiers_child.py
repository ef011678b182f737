"""Runs contexts with and without KV tiers on a loopback RPC device and prints what they gave, as one JSON object.

    python tiers_child.py HOST:PORT MODEL SCENARIO

A process of its own: the RPC device must not become a device of other tests' models. The reference is always the same
device, the same model and the same calls with one memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridgen_gguf.engine import tiers as kv
from hybridgen_gguf.engine.handles import Model, start
from hybridgen_gguf.engine.tiers import TierCounters, Tiers
from hybridgen_gguf.settings import KV_TYPES, ModelSettings, Placement

Logits = NDArray[np.float32]


class Run:
    """One context, used through the binding: sequences, shifts and states are not in handles.Context."""

    def __init__(
        self,
        model: Model,
        tiers: Tiers | None,
        n_ctx: int,
        n_ubatch: int = 64,
        n_seq: int = 1,
        unified: bool = True,
        kind: str = "f16",
    ) -> None:
        self.model, self.api = model, model.api
        p = self.api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.kv_unified = n_ctx, n_ctx, n_ubatch, n_seq, unified
        p.type_k = p.type_v = KV_TYPES[kind]
        p.flash_attn_type, p.n_threads, p.n_threads_batch = 1, 1, 1
        with kv.pending(model.library, tiers) as asked:
            self.handle = self.api.llama_init_from_model(model.handle, p)
        self.note = asked.note
        self.memory = self.api.llama_get_memory(self.handle) if self.handle else None
        self.at: dict[int, int] = {}

    def decode(self, tokens: Sequence[int], seq: int, position: int, every: bool) -> Logits:
        """Logits after the last token, or after every token, [tokens, vocabulary]."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position + i, 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = every or i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        status = self.api.llama_decode(self.handle, batch)
        self.api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")
        pointer = self.api.llama_get_logits(self.handle)
        return np.array(np.ctypeslib.as_array(pointer, shape=(len(tokens) if every else 1, self.model.n_vocab)))

    def feed(self, tokens: Sequence[int], seq: int = 0) -> Logits:
        """Logits after the last token."""
        first = self.at.get(seq, 0)
        self.at[seq] = first + len(tokens)
        return np.asarray(self.decode(tokens, seq, first, False)[0])

    def steps(self, tokens: Sequence[int], seq: int = 0) -> Logits:
        return np.stack([self.feed([t], seq) for t in tokens])

    def counters(self) -> TierCounters | None:
        return kv.counters(self.model.library, self.handle)

    def state(self) -> Any:
        size = self.api.llama_state_get_size(self.handle)
        data = (ctypes.c_uint8 * size)()
        if self.api.llama_state_get_data(self.handle, data, size) != size:
            raise RuntimeError("the state has another size than announced")
        return data

    def restore(self, data: Any, at: dict[int, int]) -> None:
        if self.api.llama_state_set_data(self.handle, data, len(data)) == 0:
            raise RuntimeError("the state was refused")
        self.at = dict(at)

    def close(self) -> None:
        self.api.llama_free(self.handle)


def divergences(reference: Logits, other: Logits) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of each row, in nats."""

    def log_softmax(x: Logits) -> NDArray[np.float64]:
        y = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return np.asarray(y - np.log(np.exp(y).sum(axis=-1, keepdims=True)))

    a, b = log_softmax(reference), log_softmax(other)
    return np.asarray((np.exp(a) * (a - b)).sum(axis=-1))


def against(reference: Logits, other: Logits) -> dict[str, float]:
    return {
        "max": float(np.abs(reference - other).max()),
        "kl": float(divergences(reference, other).mean()),
        "top1": float((reference.argmax(-1) == other.argmax(-1)).mean()),
    }


def tokens_of(model: Model, n: int, seed: int = 5) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, model.n_vocab, n)]


def facts(counters: TierCounters | None) -> dict[str, Any]:
    return {} if counters is None else dict(vars(counters))


def splits(model: Model) -> Any:
    """The same text at every split, attended on the CPU and on the device."""
    n_ctx, prompt = 512, 490
    text = tokens_of(model, n_ctx)

    def go(tiers: Tiers | None) -> tuple[Logits, dict[str, Any]]:
        run = Run(model, tiers, n_ctx)
        logits = np.concatenate([[run.feed(text[:prompt])], run.steps(text[prompt:])])
        found = facts(run.counters())
        run.close()
        return logits, found

    reference, _ = go(None)
    result = []
    for cells in (n_ctx, n_ctx - 1, n_ctx // 2, 1, 0):
        for cpu_tokens in (None, 0):
            logits, found = go(Tiers(cells, cpu_tokens=cpu_tokens))
            result.append({"cells": cells, "cpu_tokens": cpu_tokens, **against(reference, logits), "counters": found})
    return result


def compare(model: Model, work: Callable[[Run], Logits], tiers: Tiers, **context: Any) -> dict[str, Any]:
    reference = Run(model, None, **context)
    other = Run(model, tiers, **context)
    result = against(work(reference), work(other))
    found = facts(other.counters())
    reference.close()
    other.close()
    return {**result, "counters": found}


def recent(model: Model) -> Any:
    text = tokens_of(model, 700)
    tiers = Tiers(256, policy="recent", block=64, sinks=4)
    return compare(
        model, lambda run: np.concatenate([[run.feed(text[:200])], run.steps(text[200:420])]), tiers, n_ctx=768
    )


def recent_text(model: Model) -> Any:
    """Greedy text while the border moves every 8 tokens."""
    return greedy(model, (192, 128, 32), 60, 256, policy="recent", block=16)


def recent_windows(model: Model) -> Any:
    return greedy(model, (400,), 24, 768, policy="recent", block=16)


def large_batches(model: Model) -> Any:
    """Micro-batches of 2,048 tokens that straddle the border, then single tokens."""
    text = tokens_of(model, 2420)
    kinds = {"f16": Tiers(300), "q8_0": Tiers(300, type_k="q8_0", type_v="q8_0"), "none": Tiers(0)}

    def work(run: Run) -> Logits:
        return np.concatenate([[run.feed(text[:2400])], run.steps(text[2400:2404])])

    return {name: compare(model, work, tiers, n_ctx=2560, n_ubatch=2048) for name, tiers in kinds.items()}


def shared(model: Model) -> Any:
    """A part of the host cells goes to the device while the CPU attends to the others."""
    text = tokens_of(model, 1300)

    def work(run: Run) -> Logits:
        rows = [run.feed(text[:900])]
        rows += [*run.steps(text[900:910]), run.feed(text[910:914])]
        run.api.llama_memory_seq_rm(run.memory, 0, 400, 420)  # new cells take the place: these must not be copied ahead
        rows += [*run.steps(text[914:940]), run.feed(text[940:1100]), *run.steps(text[1100:1104])]
        return np.stack(rows)

    found = {}
    for kind in ("f16", "q8_0"):
        for share in (0.3, 0.9):
            for cells in (0, 200):
                tiers = Tiers(cells, share=share)
                found[f"{kind}, {share} of all but {cells}"] = compare(model, work, tiers, n_ctx=1280, kind=kind)
    return found


def scattered(model: Model) -> Any:
    """A prompt whose rows fill many small holes in host memory, attended on the device."""
    text = tokens_of(model, 500)

    def work(run: Run) -> Logits:
        run.feed(text[:400])
        for hole in range(140, 400, 12):
            run.api.llama_memory_seq_rm(run.memory, 0, hole, hole + 3)
        return np.concatenate([[run.feed(text[400:460])], run.steps(text[460:464])])

    return compare(model, work, Tiers(128, cpu_tokens=0), n_ctx=448)


def sequences(model: Model) -> Any:
    """Two sequences in one stream and in two, one a copy of the other, then both on their own."""
    a, b = tokens_of(model, 400, 1), tokens_of(model, 400, 2)

    def work(run: Run) -> Logits:
        run.feed(a[:150])
        run.api.llama_memory_seq_cp(run.memory, 0, 1, -1, -1)
        run.at[1] = run.at[0]
        rows = [run.feed(b[:40], 1), run.feed(a[150:200], 0)]
        rows += [row for i in range(10) for row in (run.feed([b[50 + i]], 1), run.feed([a[210 + i]], 0))]
        run.api.llama_memory_seq_rm(run.memory, 1, 100, -1)
        run.at[1] = 100
        rows += [run.feed(b[60:90], 1), run.feed([a[230]], 0)]
        return np.stack(rows)

    moving = Tiers(100, policy="recent", block=16)
    return {
        "unified": compare(model, work, Tiers(100), n_ctx=512, n_seq=2),
        "streams": compare(model, work, Tiers(100), n_ctx=1024, n_seq=2, unified=False),
        "unified, recent": compare(model, work, moving, n_ctx=512, n_seq=2),
        "streams, recent": compare(model, work, moving, n_ctx=1024, n_seq=2, unified=False),
        "streams, on the device": compare(model, work, Tiers(100, cpu_tokens=0), n_ctx=1024, n_seq=2, unified=False),
        "streams, q8_0": compare(model, work, Tiers(100), n_ctx=1024, n_seq=2, unified=False, kind="q8_0"),
    }


def shift(model: Model) -> Any:
    text = tokens_of(model, 400)

    def work(run: Run) -> Logits:
        run.feed(text[:300])
        run.api.llama_memory_seq_rm(run.memory, 0, 50, 150)
        run.api.llama_memory_seq_add(run.memory, 0, 150, -1, -100)
        run.at[0] -= 100
        return run.steps(text[300:320])

    return {
        "f16": compare(model, work, Tiers(128), n_ctx=512),
        "q8_0": compare(model, work, Tiers(128), n_ctx=512, kind="q8_0"),
        "mixed": compare(model, work, Tiers(128, type_k="q8_0", type_v="q8_0"), n_ctx=512),
    }


def state(model: Model) -> Any:
    """A state moves from one memory to two, from two to one, and between two borders."""
    text = tokens_of(model, 400)
    result = {}
    for kind in ("f16", "q8_0"):
        places = {"one": None, "two": Tiers(128), "border": Tiers(200), "recent": Tiers(128, policy="recent", block=16)}
        runs = {name: Run(model, tiers, 512, kind=kind) for name, tiers in places.items()}
        for name in ("one", "two", "recent"):
            runs[name].feed(text[:200])
            runs[name].steps(text[200:300])
        saved = {name: (runs[name].state(), dict(runs[name].at)) for name in ("one", "two", "recent")}
        reference = runs["one"].steps(text[300:310])
        for source, target in (("one", "two"), ("two", "one"), ("two", "border"), ("recent", "one"), ("one", "recent")):
            runs[target].restore(*saved[source])
            result[f"{source} to {target}, {kind}"] = against(reference, runs[target].steps(text[300:310]))
        for run in runs.values():
            run.close()
    return result


def quantized(model: Model) -> Any:
    """Median divergence from f16 of a q8_0 host tier, and of stock with all cells in q8_0."""
    text = model.tokenize(Path(__file__).with_name("tiers_text.txt").read_bytes(), True, False)[:256]
    host = Tiers(64, type_k="q8_0", type_v="q8_0", cpu_tokens=64)
    ways = {"f16": (None, "f16"), "tiers": (host, "f16"), "stock": (None, "q8_0"), "device": (Tiers(64), "q8_0")}
    logits: dict[str, Logits] = {}
    for name, (tiers, kind) in ways.items():
        run = Run(model, tiers, 256, kind=kind)
        logits[name] = np.concatenate([run.decode(text[i : i + 64], 0, i, True) for i in range(0, 256, 64)])
        run.close()
    return {name: float(np.median(divergences(logits["f16"], logits[name]))) for name in ("tiers", "stock", "device")}


def greedy(
    model: Model, cells: Sequence[int] = (255, 128, 1, 0), length: int = 20, n_ctx: int = 256, **tiers: Any
) -> Any:
    """Greedy text; where it differs from one memory, how near the two best tokens were there."""
    prompt = model.tokenize(Path(__file__).with_name("tiers_text.txt").read_bytes(), True, False)[: n_ctx - length - 2]

    def go(placed: Tiers | None) -> tuple[list[int], list[float], dict[str, Any]]:
        run = Run(model, placed, n_ctx, 128)
        logits, text, gaps = run.feed(prompt), [], []
        for _ in range(length):
            second, first = np.sort(logits)[-2:]
            gaps.append(float(first - second))
            text.append(int(logits.argmax()))
            logits = run.feed(text[-1:])
        found = facts(run.counters())
        run.close()
        return text, gaps, found

    reference, gaps, _ = go(None)
    result = []
    for n in cells:
        text, _, found = go(Tiers(n, **tiers))
        differ = next((i for i, (x, y) in enumerate(zip(reference, text, strict=True)) if x != y), None)
        result.append(
            {"cells": n, "differs_at": differ, "gap": None if differ is None else gaps[differ], "counters": found}
        )
    return result


def windows(model: Model) -> Any:
    return greedy(model, (400,), 10, 768)


def refusals(model: Model) -> Any:
    """Tiers that cannot be had: no context, a reason, and the process lives on."""
    huge = Run(model, Tiers(256), 1 << 22)
    reason = huge.note
    plain = Run(model, None, 512)
    alive = bool(np.isfinite(plain.feed([5, 6, 7])).all())
    plain.close()
    return {"made": bool(huge.handle), "reason": reason, "alive": alive}


def main() -> None:
    endpoint, path, scenario = sys.argv[1:]
    library = start()
    library.add_rpc(endpoint)
    name = next(d.name for d in library.devices() if d.name.startswith("RPC"))
    with Model(Path(path), ModelSettings(n_gpu_layers=99, placement=Placement(devices=(name,)))) as model:
        on_device = model.layer_devices()[0] == name
        print(json.dumps({"on_device": on_device, "result": globals()[scenario](model)}))


if __name__ == "__main__":
    main()
