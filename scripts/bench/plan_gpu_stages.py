"""Plans against stock llama.cpp's own fit under the same budgets of device memory: decode speed at depth, on a GPU.

    python plan_gpu_stages.py WORK [STAGE ...] [--threads 16] [--rpc HOST:PORT]
    stages, a model's also as MODEL:CONTEXTS:BUDGETS such as dense8:4096:4,6:
    profile dense8 experts30 dense32 parts[:MODEL...] report; tiny: on a small model, to try the script;
    record: WORK/plan_gpu.jsonl → WORK/plan-gpu.json with machine, date and --commit, for docs/benchmarks

WORK holds the patched engine (build/bin), the stock one with llama-fit-params (stock/build/bin) and, made on first use,
the models (random Q4_K weights, right shapes). Each measurement is a process of its own, because the two engines cannot
share one. A cache of the depth is filled once for each model with everything on the device and restored in each.
Both sides keep scratch for the logits of one token, as llama-server does; llama-fit-params counts those of a whole
micro-batch, so its budget is that much larger. Placements that come out near each other are measured again, both sides
in turn. One JSON line a measurement in $OUT/plan_gpu.jsonl (WORK without OUT): a run that is cut off keeps what it has;
`report` sums up.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import mmap
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plan_models import SHAPES, write_model

GIB = 1 << 30
DRIVER_BYTES = 90 << 20  # what the driver takes beside the engine's buffers: 71 to 88 MB found
BUDGETS: dict[str, tuple[float, ...]] = {
    "dense8": (4, 6, 8, 12), "experts30": (4, 6, 8, 12), "dense32": (4, 6, 8, 12), "tiny": (0.004, 0.01),
}  # fmt: skip
CONTEXTS = {"tiny": (1024,)}
SECONDS, FEWEST, MOST, WARM = 0.8, 4, 96, 3  # of timed steps
NEAR, REPEATS = (0.93, 1.04), 2  # ratios that are measured again


def worker(job: dict[str, Any]) -> None:
    """Opens a model as `job` says, restores or makes the cache, times writing; the last line printed is the result."""
    try:
        print(json.dumps(timed(job, *(open_ours(job) if job["ours"] else open_stock(job)))))
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}))


def open_ours(job: dict[str, Any]) -> tuple[Any, Any, Callable[[], int]]:
    """Through hybridgen_gguf's own opening, tiers included: (API, context, free bytes of the device)."""
    from hybridgen_gguf.engine.child import settings_from
    from hybridgen_gguf.engine.handles import Context, Model, start

    library = start()
    for endpoint in job["rpc"]:
        library.add_rpc(endpoint)
    free = _free_bytes(library.base, library.ggml)
    job["before"] = free()
    model_settings, context_settings = settings_from(job)
    context = Context(Model(Path(job["path"]), model_settings), context_settings)
    job["context_open"] = context  # kept open
    used = [entry for entry in context.memory_use() if not entry.is_host]
    job["counted"] = sum(entry.total for entry in used)
    return library.api, context.handle, free


def open_stock(job: dict[str, Any]) -> tuple[Any, Any, Callable[[], int]]:
    import llama_cpp.llama_cpp as api  # before numpy: with NumPy 2.5 loaded first, one library crashed

    from hybridgen_gguf.engine import abi
    from hybridgen_gguf.engine.abi import ggml as tables

    quiet = api.llama_log_callback(lambda _level, _text, _data: None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
    base, ggml = ctypes.CDLL(str(folder / "libggml-base.so")), ctypes.CDLL(str(folder / "libggml.so"))
    if not (abi.declare(base, tables.BASE) and abi.declare(ggml, tables.REGISTRY)):
        raise RuntimeError(f"{folder} is not an engine of this version")
    free = _free_bytes(base, ggml)
    place, settings = job["model"]["placement"], job["context"]
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = job["model"]["n_gpu_layers"]
    kept = _overrides(base, ggml, place["overrides"])
    if kept is not None:
        parameters.tensor_buft_overrides = ctypes.cast(kept, ctypes.c_void_p)
    job["before"] = free()
    model = api.llama_model_load_from_file(job["path"].encode(), parameters)
    if not model:
        raise RuntimeError("the model was not loaded")
    wanted = api.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = settings["n_ctx"], settings["n_batch"], settings["n_ubatch"]
    wanted.n_outputs_max = settings["n_outputs"]
    wanted.offload_kqv, wanted.flash_attn_type = place["kv_offload"], 1
    wanted.n_threads = wanted.n_threads_batch = settings["threads"]
    context = api.llama_init_from_model(model, wanted)
    if not context:
        raise RuntimeError("no context")
    job["kept"] = (quiet, kept)
    return api, context, free


def timed(job: dict[str, Any], api: Any, context: Any, free: Callable[[], int]) -> dict[str, Any]:
    """Restores the cache, or makes and saves it, then times one token after another."""

    def feed(tokens: list[int]) -> None:
        buffer, most = (api.llama_token * len(tokens))(*tokens), job["context"]["n_batch"]
        for i in range(0, len(tokens), most):
            part = ctypes.cast(ctypes.byref(buffer, 4 * i), ctypes.POINTER(api.llama_token))
            if api.llama_decode(context, api.llama_batch_get_one(part, min(most, len(tokens) - i))) != 0:
                raise RuntimeError("llama_decode failed")
        api.llama_synchronize(context)

    state, facts = Path(job["state"]), {}
    if state.exists():
        with state.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            data = (ctypes.c_uint8 * len(view)).from_buffer(view)
            taken = api.llama_state_set_data(context, data, len(view))
            del data
        if not taken:
            raise RuntimeError("the cache was refused")
    else:
        start = time.perf_counter()
        feed([(7919 * i) % (job["vocab"] - 2) + 1 for i in range(job["depth"])])
        facts["prompt_tps"] = round(job["depth"] / (time.perf_counter() - start), 1)
        size = api.llama_state_get_size(context)
        data = (ctypes.c_uint8 * size)()
        written = api.llama_state_get_data(context, data, size)
        state.write_bytes(memoryview(data)[:written])
    times: list[float] = []
    begin = time.perf_counter()
    for i in range(WARM + MOST):
        start = time.perf_counter()
        feed([100 + i])
        warm = i >= WARM or start - begin > SECONDS
        times += [time.perf_counter() - start] if warm else []
        if len(times) >= FEWEST and sum(times) > SECONDS:
            break
    median = statistics.median(times)
    facts |= {"decode_tps": round(1 / median, 2), "ms": round(median * 1e3, 3), "steps": len(times),
              "device_bytes": job["before"] - free()}  # fmt: skip
    return facts | ({"device_bytes_counted": job["counted"]} if "counted" in job else {})


def _free_bytes(base: ctypes.CDLL, ggml: ctypes.CDLL) -> Callable[[], int]:
    """`base` and `ggml`: handles with the declarations of hybridgen_gguf.engine.abi."""
    device = ggml.ggml_backend_dev_get(0)

    def free() -> int:
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(left), ctypes.byref(total))
        return left.value

    return free


def _overrides(base: ctypes.CDLL, ggml: ctypes.CDLL, pairs: list[list[str]]) -> Any:
    from hybridgen_gguf.engine.abi.llama import TensorOverride

    if not pairs:
        return None
    devices = [ggml.ggml_backend_dev_by_name(to.encode()) for _, to in pairs]
    rows = [TensorOverride(pattern.encode(), base.ggml_backend_dev_buffer_type(device))
            for (pattern, _), device in zip(pairs, devices, strict=True)]  # fmt: skip
    return (TensorOverride * (len(rows) + 1))(*rows, TensorOverride(None, None))


class Bench:
    """Everything that one run needs to know."""

    def __init__(self, work: Path, threads: int, rpc: tuple[str, ...], seconds: float) -> None:
        self.work, self.threads, self.rpc, self.seconds = work, threads, rpc, seconds
        self.ours, self.stock = work / "build" / "bin", work / "stock" / "build" / "bin"
        self.log = Path(os.environ.get("OUT", work)) / "plan_gpu.jsonl"
        self.known: dict[str, dict[str, Any]] = {}
        os.environ["HGGUF_ENGINE"] = os.environ["LLAMA_CPP_LIB_PATH"] = str(self.ours)
        os.environ.setdefault("HGGUF_CACHE", str(work))
        os.environ.setdefault("HGGUF_MEMORY_CHECK", "off")  # a rented machine's memory may grow with its use

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
        from hybridgen_gguf.machine import measure as profiling
        from hybridgen_gguf.machine import profile

        found = profiling.measure(self.machine(), seconds=self.seconds)
        profile.save(found)
        self.say(what="profile", **profile.as_json(found))

    def stage(self, name: str, contexts: str = "", budgets: str = "") -> None:
        start = time.perf_counter()
        path = self.model(name)
        some = tuple(map(int, contexts.split(","))) if contexts else CONTEXTS.get(name, (4096, 32768))
        for n_ctx in some:
            full = self.measure(path, n_ctx, self.place(n_ctx, 999), self.ours)
            self.say(what="all on the device", model=name, n_ctx=n_ctx, **full)
            for budget in map(float, budgets.split(",")) if budgets else BUDGETS[name]:
                plan = self.planned(path, n_ctx, budget)
                fit = self.fitted_within(path, n_ctx, budget)
                sides: dict[str, list[Any]] = {"plan": [], "fit": []}
                for repeat in range(REPEATS):
                    for side, place, engine in (("plan", plan, self.ours), ("fit", fit, self.stock)):
                        if "model" in place:
                            sides[side].append(self.measure(path, n_ctx, place, engine, repeat))
                    found = [measured[0].get("decode_tps") if measured else None for measured in sides.values()]
                    if not all(found) or not NEAR[0] < found[0] / found[1] < NEAR[1]:
                        break
                self.say(what="pair", model=name, n_ctx=n_ctx, budget_gib=budget, plan=plan | middle(sides["plan"]),
                         fit=fit | middle(sides["fit"]))  # fmt: skip
            (self.work / f"{name}-{n_ctx}.state").unlink(missing_ok=True)
        self.say(what="stage", name=name, s=round(time.perf_counter() - start))

    def parts(self, name: str, n_ctx: int = 4096) -> None:
        """What each kind of part costs on the host: whole layers, FFNs or experts, the output, KV; mapped and read."""
        path, n = self.model(name), SHAPES[name][0]
        heavy = "ffn_(down|gate|up)(_exps)?\\.weight"
        some = [[f"blk\\.({'|'.join(map(str, range(n // 4)))})\\.{heavy}", "CPU"]]
        half = [[f"blk\\.({'|'.join(map(str, range(n // 2)))})\\.{heavy}", "CPU"]]
        variants: dict[str, dict[str, Any]] = {
            "everything on the device": {},
            "a quarter of the layers": {"ngl": n + 1 - n // 4},
            "a quarter of the layers, read": {"ngl": n + 1 - n // 4, "use_mmap": False},
            "a quarter of the heavy parts": {"overrides": some},
            "a quarter of the heavy parts, read": {"overrides": some, "use_mmap": False},
            "half of the heavy parts": {"overrides": half},
            "the output": {"overrides": [["^output\\.weight", "CPU"]]},
            "all KV but 256 cells": {"tiers": {"cells": 256}},
            "half of the KV": {"tiers": {"cells": n_ctx // 2}},
        }
        for what, changes in variants.items():
            place = self.place(n_ctx, changes.pop("ngl", n + 1), **changes)
            row = {"ours": self.measure(path, n_ctx, place, self.ours)}
            if "tiers" not in changes and "use_mmap" not in changes:
                row["stock"] = self.measure(path, n_ctx, place, self.stock)
            self.say(what="parts", model=name, n_ctx=n_ctx, part=what, **row)

    def place(self, n_ctx: int, ngl: int, **placement: Any) -> dict[str, Any]:
        """The settings for a placement with llama.cpp's default batches."""
        from hybridgen_gguf.settings import ContextSettings, ModelSettings, placement_of

        place = placement_of(placement)
        context = ContextSettings(n_ctx, flash_attention="on", threads=self.threads, threads_batch=self.threads,
                                  n_outputs=1, placement=place)  # fmt: skip
        return {"model": asdict(ModelSettings(ngl, place)), "context": asdict(context)}

    def planned(self, path: Path, n_ctx: int, budget: float) -> dict[str, Any]:
        from hybridgen_gguf.loader import prepare
        from hybridgen_gguf.plan import Limits

        start = time.perf_counter()
        limits = Limits(n_ctx=n_ctx, vram=int(budget * GIB), goal="decode", depth=n_ctx - 256, threads=self.threads,
                        flash_attention="on")  # fmt: skip
        try:
            plan = prepare(path, limits, rpc=self.rpc).plan
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        model, context = plan.model, plan.context
        predicted = plan.predicted.decode_tps if plan.predicted else None
        return {"model": asdict(model), "context": asdict(context), "predicted_tps": predicted,
                "foretold_bytes": plan.bytes_device, "planning_s": round(time.perf_counter() - start, 2),
                "text": " ".join(plan.as_arguments()), "why": [asdict(reason) for reason in plan.reasons]}  # fmt: skip

    def fitted(self, path: Path, n_ctx: int, budget: float) -> dict[str, Any]:
        """What stock's llama-fit-params chooses when it has to leave all but the budget free."""
        device = self.machine().devices[0]
        logits = 4 * (512 - 1) * SHAPES[path.stem][5]  # of the other tokens of a micro-batch
        margin = (device.memory_free - int(budget * GIB) - logits) >> 20
        command = [str(self.stock / "llama-fit-params"), "-m", str(path), "-c", str(n_ctx), "-fa", "on",
                   "-fitt", str(margin)]  # fmt: skip
        environment = os.environ | {"LD_LIBRARY_PATH": str(self.stock)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        except OSError as error:
            return {"failed": str(error)}
        lines = [line for line in done.stdout.splitlines() if "-ngl" in line]
        if done.returncode or not lines:
            return {"failed": (done.stderr or done.stdout)[-300:]}
        ngl, overrides = 0, []
        for flag, value in itertools.pairwise(shlex.split(lines[-1])):
            if flag == "-ngl":
                ngl = int(value)
            elif flag == "-ot":
                overrides = [list(part.rpartition("=")[::2]) for part in value.split(",")]
        return self.place(n_ctx, ngl, overrides=overrides) | {"text": lines[-1]}

    def fitted_within(self, path: Path, n_ctx: int, budget: float) -> dict[str, Any]:
        """The same, asked again with less while it takes more: the scratch of the other logits is not all saved."""
        asked = budget
        fit = self.fitted(path, n_ctx, asked)
        for _ in range(3):
            taken = self.measure(path, n_ctx, fit, self.stock).get("device_bytes", 0) if "model" in fit else 0
            over = taken - DRIVER_BYTES - int(budget * GIB)
            if over <= 0:
                break
            asked -= over / GIB
            fit = self.fitted(path, n_ctx, asked)
        return fit

    def measure(self, path: Path, n_ctx: int, place: dict[str, Any], engine: Path, repeat: int = 0) -> dict[str, Any]:
        """One process; the same settings are measured once for each repeat."""
        key = json.dumps([str(path), place["model"], place["context"], str(engine), repeat])
        if key not in self.known:
            self.known[key] = self._measured(path, n_ctx, place, engine)
        return self.known[key]

    def _measured(self, path: Path, n_ctx: int, place: dict[str, Any], engine: Path) -> dict[str, Any]:
        name = path.stem
        job = {"path": str(path), "depth": n_ctx - 256, "vocab": SHAPES[name][5], "ours": engine == self.ours,
               "state": str(self.work / f"{name}-{n_ctx}.state"), "rpc": self.rpc,
               "model": place["model"], "context": place["context"]}  # fmt: skip
        environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(engine), "LD_LIBRARY_PATH": str(engine)}
        command = [sys.executable, __file__, str(self.work), "--worker", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            found = {"failed": f"exit code {done.returncode}: {done.stderr[-300:]}"}
        return found

    def machine(self) -> Any:
        """This machine with the devices that our engine sees; needs none of the packages for the command line."""
        from hybridgen_gguf.engine.child import Child
        from hybridgen_gguf.loader import with_engine_devices
        from hybridgen_gguf.machine.probe import read_hardware

        with Child(self.rpc) as child:
            return with_engine_devices(read_hardware(), child)

    def report(self) -> None:
        rows = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        pairs = [row for row in rows if row["what"] == "pair"]
        ratios = []
        for row in pairs:
            ours, stock = (row[side].get("decode_tps") for side in ("plan", "fit"))
            ratio = round(ours / stock, 3) if ours and stock else None
            ratios += [ratio] if ratio else []
            print(row["model"], row["n_ctx"], f"{row['budget_gib']} GiB", "plan", ours, "fit", stock, "ratio", ratio,
                  "predicted", row["plan"].get("predicted_tps"), row["plan"].get("failed", ""))  # fmt: skip
        if ratios:
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            self.say(what="summary", pairs=len(pairs), compared=len(ratios), geometric_mean=round(mean, 3),
                     least=min(ratios), failed=len(pairs) - len(ratios))  # fmt: skip


def record(log: Path, out: Path, commit: str) -> None:
    """Writes what came back as one JSON file for docs/benchmarks."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    profile = next(row for row in rows if row["what"] == "profile")
    devices = ", ".join(device["description"] for device in profile["devices"])
    about = {"machine": f"{profile['cpu']['model']}, {profile['cpu']['logical']} CPUs; {devices}",
             "date": profile["measured"][:10], "commit": commit, "command": "scripts/bench/plan_gpu measure",
             "links": profile["links"], "memory_read_gbps": profile["memory"]["read_gbps"]}  # fmt: skip
    kept = [{key: short(value) for key, value in row.items()} for row in rows if row["what"] != "profile"]
    out.write_text(json.dumps(about | {"measurements": kept}, indent=1) + "\n", encoding="utf-8")


def short(side: Any) -> Any:
    """A side of a pair without what its text says in fewer words."""
    if not isinstance(side, dict) or "model" not in side:
        return side
    kept = {key: value for key, value in side.items() if key not in ("model", "context", "why")}
    tiers = side["model"]["placement"].get("tiers")
    return kept | ({} if tiers is None else {f"tier_{key}": tiers[key] for key in ("cells", "type", "cpu_tokens")})


def middle(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of several measurements, with all of their speeds."""
    if not measured or "decode_tps" not in measured[0]:
        return measured[0] if measured else {}
    found = sorted((one for one in measured if "decode_tps" in one), key=lambda one: one["decode_tps"])
    return found[len(found) // 2] | {"all_tps": [one.get("decode_tps") for one in measured]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("stages", nargs="*", default=["profile", "dense8", "experts30", "dense32", "report"])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--profile-seconds", type=float, default=17.0)
    parser.add_argument("--commit", default="", help="for record: of the tree that was measured")
    parser.add_argument("--rpc", action="append", default=[], help="a server to use as the device, to try the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(json.loads(asked.worker))
        return
    bench = Bench(asked.work, asked.threads, tuple(asked.rpc), asked.profile_seconds)
    for stage in asked.stages:
        if stage == "profile":
            bench.profile()
        elif stage == "record":
            record(asked.work / "plan_gpu.jsonl", asked.work / "plan-gpu.json", asked.commit)
        elif stage == "report":
            bench.report()
        elif stage.startswith("parts"):
            for name in stage.split(":")[1:] or ["dense8", "experts30"]:
                bench.parts(name, CONTEXTS.get(name, (4096,))[0])
        else:
            bench.stage(*stage.split(":"))


if __name__ == "__main__":
    main()
