"""Plans against stock llama.cpp's own fit under the same budgets of device memory: decode speed at depth, on a GPU.

    python bench_plan_gpu.py WORK [STAGE ...] [--threads 16]     stages: profile dense8 experts30 dense32 report

WORK holds the patched engine (build/bin), the stock one with llama-fit-params (stock/build/bin) and, made on first use,
the models (random Q4_K weights, right shapes). Each measurement is a process of its own, because the two engines cannot
share one. A cache of the depth is filled once for each model with everything on the device and restored in each.
One JSON line a measurement in WORK/plan_gpu.jsonl: a run that is cut off keeps what it has; `report` sums up.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
BUDGETS = {"dense8": (4, 6, 8, 12), "experts30": (4, 6, 8, 12), "dense32": (6, 12)}
CONTEXTS = (4096, 32768)
STEPS = 12
# layers, width, FFN, heads, KV heads, vocabulary, experts, used (0: dense)
SHAPES = {
    "dense8": (32, 4096, 14336, 32, 8, 128256, 0, 0),
    "dense32": (64, 5120, 27648, 40, 8, 151936, 0, 0),
    "experts30": (48, 2048, 768, 32, 4, 151936, 128, 8),
    "tiny": (4, 256, 512, 4, 2, 512, 8, 2),
}


def write_model(out: Path, name: str) -> None:
    """A llama, or a Qwen3 with experts, with random Q4_K weights."""
    import gguf
    import numpy as np

    layers, width, ffn, heads, kv_heads, vocab, experts, used = SHAPES[name]
    head = 128 if experts else width // heads
    arch = "qwen3moe" if experts else "llama"
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (1 << 16, 144), dtype=np.uint8)
    block[:, :4] = np.frombuffer(np.array([2.5e-5, 1.2e-4], np.float16).tobytes(), np.uint8)
    w = gguf.GGUFWriter(str(out), arch)
    w.add_name(name)
    w.add_context_length(131072)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(500000.0)
    w.add_rope_dimension_count(head)
    w.add_vocab_size(vocab)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(15)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(used)
        w.add_expert_feed_forward_length(ffn)

    arrays: dict[tuple[int, ...], Any] = {}  # the writer keeps tensors until the end: alike ones share one array

    def add(tensor: str, *dims: int) -> None:
        if dims not in arrays:
            data = np.resize(block, (math.prod(dims) // 256, 144))
            arrays[dims] = data.reshape(*dims[:-1], dims[-1] // 256 * 144)
        w.add_tensor(f"{tensor}.weight", arrays[dims], raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    def ones(tensor: str, size: int) -> None:
        w.add_tensor(f"{tensor}.weight", np.ones(size, np.float32))

    add("token_embd", vocab, width)
    ones("output_norm", width)
    add("output", vocab, width)
    for i in range(layers):
        at = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            ones(at + norm, width)
        add(at + "attn_q", heads * head, width)
        add(at + "attn_k", kv_heads * head, width)
        add(at + "attn_v", kv_heads * head, width)
        add(at + "attn_output", width, heads * head)
        if experts:
            ones(at + "attn_q_norm", head)
            ones(at + "attn_k_norm", head)
            w.add_tensor(f"{at}ffn_gate_inp.weight", rng.normal(0, 0.02, (experts, width)).astype(np.float32))
            for part, dims in (("gate", (experts, ffn, width)), ("up", (experts, ffn, width)),
                               ("down", (experts, width, ffn))):  # fmt: skip
                add(f"{at}ffn_{part}_exps", *dims)
        else:
            add(at + "ffn_gate", ffn, width)
            add(at + "ffn_up", ffn, width)
            add(at + "ffn_down", width, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def worker(job: dict[str, Any]) -> None:
    """Opens a model as `job` says, restores or makes the cache, times writing; the last line printed is the result."""
    import llama_cpp.llama_cpp as api  # before numpy: with NumPy 2.5 loaded first, one library crashed

    quiet = api.llama_log_callback(lambda _level, _text, _data: None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
    base, ggml = ctypes.CDLL(str(folder / "libggml-base.so")), ctypes.CDLL(str(folder / "libggml.so"))
    free = _free_bytes(base, ggml)
    before = free()
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = job["ngl"]
    kept = _overrides(base, ggml, job["overrides"])
    if kept is not None:
        parameters.tensor_buft_overrides = ctypes.cast(kept, ctypes.c_void_p)
    model = api.llama_model_load_from_file(job["model"].encode(), parameters)
    if not model:
        print(json.dumps({"failed": "the model was not loaded"}))
        return
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = job["n_ctx"], 2048, 512
    settings.offload_kqv, settings.flash_attn_type = job["kv_offload"], 1
    settings.n_threads = settings.n_threads_batch = job["threads"]
    context = api.llama_init_from_model(model, settings)
    if not context:
        print(json.dumps({"failed": "no context"}))
        return

    def feed(tokens: list[int]) -> None:
        buffer = (api.llama_token * len(tokens))(*tokens)
        for i in range(0, len(tokens), 2048):
            part = ctypes.cast(ctypes.byref(buffer, 4 * i), ctypes.POINTER(api.llama_token))
            if api.llama_decode(context, api.llama_batch_get_one(part, min(2048, len(tokens) - i))) != 0:
                raise RuntimeError("llama_decode failed")
        api.llama_synchronize(context)

    state, depth = Path(job["state"]), job["depth"]
    if state.exists():
        size = state.stat().st_size
        data = (ctypes.c_uint8 * size)()
        with state.open("rb", buffering=0) as file:
            view = memoryview(data).cast("B")
            done = 0
            while done < size:
                done += file.readinto(view[done : done + (1 << 30)]) or 0
        if api.llama_state_set_data(context, data, size) == 0:
            print(json.dumps({"failed": "the cache was refused"}))
            return
    else:
        feed([(7919 * i) % (job["vocab"] - 2) + 1 for i in range(depth)])
        size = api.llama_state_get_size(context)
        data = (ctypes.c_uint8 * size)()
        written = api.llama_state_get_data(context, data, size)
        state.write_bytes(memoryview(data)[:written])
    for token in (17, 18):
        feed([token])
    times = []
    for i in range(STEPS):
        start = time.perf_counter()
        feed([100 + i])
        times.append(time.perf_counter() - start)
    times.sort()
    print(json.dumps({"decode_tps": round(1 / times[len(times) // 2], 2), "device_bytes": before - free()}))


def _free_bytes(base: ctypes.CDLL, ggml: ctypes.CDLL) -> Callable[[], int]:
    ggml.ggml_backend_dev_get.restype, ggml.ggml_backend_dev_get.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    memory = base.ggml_backend_dev_memory
    memory.restype, memory.argtypes = None, (ctypes.c_void_p, *(ctypes.POINTER(ctypes.c_size_t),) * 2)
    device = ggml.ggml_backend_dev_get(0)

    def free() -> int:
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(left), ctypes.byref(total))
        return left.value

    return free


def _overrides(base: ctypes.CDLL, ggml: ctypes.CDLL, pairs: list[list[str]]) -> Any:
    class Override(ctypes.Structure):
        _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))

    if not pairs:
        return None
    ggml.ggml_backend_dev_by_name.restype, ggml.ggml_backend_dev_by_name.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    base.ggml_backend_dev_buffer_type.argtypes = (ctypes.c_void_p,)
    rows = [Override(pattern.encode(), base.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_name(to.encode())))
            for pattern, to in pairs]  # fmt: skip
    return (Override * (len(rows) + 1))(*rows, Override(None, None))


class Bench:
    """Everything that one run needs to know."""

    def __init__(self, work: Path, threads: int) -> None:
        self.work, self.threads = work, threads
        self.ours, self.stock = work / "build" / "bin", work / "stock" / "build" / "bin"
        self.log = work / "plan_gpu.jsonl"
        os.environ["HGGUF_ENGINE"] = os.environ["LLAMA_CPP_LIB_PATH"] = str(self.ours)
        os.environ.setdefault("HGGUF_CACHE", str(work))

    def say(self, **row: Any) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def model(self, name: str) -> Path:
        path = self.work / f"{name}.gguf"
        if not path.exists():
            start = time.perf_counter()
            write_model(path.with_suffix(".part"), name)
            path.with_suffix(".part").rename(path)
            took = round(time.perf_counter() - start)
            self.say(what="model", name=name, gib=round(path.stat().st_size / GIB, 2), s=took)
        return path

    def profile(self) -> None:
        from hybridgen_gguf import profile, profiling

        found = profiling.measure(machine())
        profile.save(found)
        self.say(what="profile", **profile.as_json(found))

    def stage(self, name: str) -> None:
        path = self.model(name)
        for n_ctx in CONTEXTS:
            everything = {"ngl": 999, "overrides": [], "kv_offload": True}
            full = self.measure(path, name, n_ctx, everything, self.ours)
            self.say(what="all on the device", model=name, n_ctx=n_ctx, **full)
            for budget in BUDGETS[name]:
                ours = self.planned(path, n_ctx, budget * GIB)
                fit = self.fitted(path, n_ctx, budget * GIB)
                row: dict[str, Any] = {"what": "pair", "model": name, "n_ctx": n_ctx, "budget_gib": budget}
                for side, place, engine in (("plan", ours, self.ours), ("fit", fit, self.stock),
                                            ("fit on our engine", fit, self.ours)):  # fmt: skip
                    row[side] = place | (self.measure(path, name, n_ctx, place, engine) if "ngl" in place else {})
                self.say(**row)
            (self.work / f"{name}-{n_ctx}.state").unlink(missing_ok=True)

    def planned(self, path: Path, n_ctx: int, budget: int) -> dict[str, Any]:
        from hybridgen_gguf.plan import Limits, make_plan
        from hybridgen_gguf.profile import with_known_rates
        from hybridgen_gguf.shape import read_shape

        hardware, why = with_known_rates(machine())
        shape = read_shape(path)
        limits = Limits(n_ctx=n_ctx, vram=budget, goal="decode", depth=n_ctx - 256, threads=self.threads)
        try:
            with _oracle(path, hardware, shape) as bytes_of:
                plan = make_plan(hardware, shape, limits, bytes_of)
        except Exception as error:
            return {"failed": str(error)}
        predicted = plan.predicted.decode_tps if plan.predicted else None
        return {"ngl": plan.n_gpu_layers, "overrides": [list(pair) for pair in plan.placement.overrides],
                "kv_offload": plan.placement.kv_offload, "predicted_tps": predicted, "note": why,
                "foretold_bytes": plan.bytes_device}  # fmt: skip

    def fitted(self, path: Path, n_ctx: int, budget: int) -> dict[str, Any]:
        """What stock's llama-fit-params chooses when it has to leave all but the budget free."""

        device = machine().devices[0]
        margin = (device.memory_free - budget) >> 20
        command = [str(self.stock / "llama-fit-params"), "-m", str(path), "-c", str(n_ctx), "-fa", "on",
                   "-fitt", str(margin)]  # fmt: skip
        environment = os.environ | {"LD_LIBRARY_PATH": str(self.stock)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if "-ngl" in line]
        if done.returncode or not lines:
            return {"failed": (done.stderr or done.stdout)[-300:]}
        words = shlex.split(lines[-1])
        place: dict[str, Any] = {"ngl": 0, "overrides": [], "kv_offload": True, "text": lines[-1]}
        for flag, value in itertools.pairwise(words):
            if flag == "-ngl":
                place["ngl"] = int(value)
            elif flag == "-ot":
                place["overrides"] = [list(part.rpartition("=")[::2]) for part in value.split(",")]
        return place

    def measure(self, path: Path, name: str, n_ctx: int, place: dict[str, Any], engine: Path) -> dict[str, Any]:
        job = {"model": str(path), "n_ctx": n_ctx, "depth": n_ctx - 256, "threads": self.threads,
               "vocab": SHAPES[name][5], "state": str(self.work / f"{name}-{n_ctx}.state"),
               **{key: place[key] for key in ("ngl", "overrides", "kv_offload")}}  # fmt: skip
        environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(engine), "LD_LIBRARY_PATH": str(engine)}
        command = [sys.executable, __file__, str(self.work), "--worker", json.dumps(job)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return {"failed": "more than 120 s"}
        if done.returncode:
            return {"failed": done.stderr[-300:]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def report(self) -> None:
        rows = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        pairs = [row for row in rows if row["what"] == "pair"]
        ratios = []
        for row in pairs:
            ours, stock = (row[side].get("decode_tps") for side in ("plan", "fit"))
            if ours and stock:
                ratios.append(ours / stock)
            print(row["model"], row["n_ctx"], f"{row['budget_gib']} GiB", "plan", ours, "fit", stock,
                  "predicted", row["plan"].get("predicted_tps"))  # fmt: skip
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            self.say(what="summary", pairs=len(pairs), compared=len(ratios), geometric_mean=round(mean, 3),
                     least=round(min(ratios), 3), failed=len(pairs) - len(ratios))  # fmt: skip


def machine() -> Any:
    """This machine with the devices that our engine sees; needs none of the packages for the command line."""
    from hybridgen_gguf.engine.child import Child
    from hybridgen_gguf.loader import with_engine_devices
    from hybridgen_gguf.probe import read_hardware

    with Child() as child:
        return with_engine_devices(read_hardware(), child)


def _oracle(path: Path, hardware: Any, shape: Any) -> Any:
    """Exact bytes from the engine in a child, for as long as one plan is made."""
    from contextlib import contextmanager

    from hybridgen_gguf.engine.child import Child
    from hybridgen_gguf.loader import _oracle as loader_oracle

    @contextmanager
    def opened() -> Any:
        with Child() as child:
            yield loader_oracle(child, shape, hardware)

    return opened()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("stages", nargs="*", default=["profile", "dense8", "experts30", "dense32", "report"])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(json.loads(asked.worker))
        return
    bench = Bench(asked.work, asked.threads)
    for stage in asked.stages:
        if stage == "profile":
            bench.profile()
        elif stage == "report":
            bench.report()
        else:
            bench.stage(stage)


if __name__ == "__main__":
    main()
