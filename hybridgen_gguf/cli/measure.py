"""What the verbs profile, tune and doctor do: asks, measures, remembers, prints. The one place where these meet.

Invariant: what was measured is remembered before it is printed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HgError, NotFound, UsageError
from ..machine.hardware import Hardware
from . import show
from .arguments import endpoints_of, limits_of
from .options import DoctorFlags, PlaceFlags, ProfileFlags, TuneFlags

if TYPE_CHECKING:
    from ..loader import Prepared
    from ..machine.profile import Profile
    from ..model_file.shape import ModelShape
    from ..plan import Draft, Limits, MemoryUse, Plan, Predicted
    from ..tune.search import Search, Trial
    from ..tuned import Setting

_LAST_SECONDS = 3.0  # of the time given: Python starts, and what was found is put into words and remembered


def machine(rpc: tuple[str, ...], folder: Path | None = None) -> Hardware:
    """The machine with the devices that the engine sees."""
    from ..engine.child import Child
    from ..loader import with_engine_devices
    from ..machine.probe import read_hardware

    with Child(rpc) as child:
        return with_engine_devices(read_hardware(folder), child)


def profile_verb(flags: ProfileFlags) -> None:
    """`hgguf profile`."""
    from ..machine import profile as profiles

    path = profiles.profile_path()
    hardware = machine(endpoints_of(flags.rpc))
    found = profiles.load(path)
    if found is not None:
        _say_why_again(found, hardware, flags.show)
    if not flags.show:
        profiles.check_can_write(path, "HGGUF_PROFILE")
        found = _measured(hardware, flags.model, endpoints_of(flags.rpc))
        profiles.save(found, path)
    if found is None:
        raise NotFound("this machine was not measured yet", "run `hgguf profile` without --show")
    if found.busy > 0.3:
        show.warning(
            f"others used {found.busy:.0%} of the CPUs while this was measured: run it again when all is quiet"
        )
    if flags.json:
        show.data(profiles.as_json(found, path))
    else:
        _print_profile(found)


def _say_why_again(found: Profile, hardware: Hardware, show_only: bool) -> None:
    from ..machine.profile import MOST_AGE, fingerprint_of

    stale = found.fingerprint != fingerprint_of(hardware)
    why = "it is of another machine, engine or set of devices" if stale else ""
    why = why or (f"it is {found.age.days} days old" if found.age > MOST_AGE else "")
    if why:
        show.note(f"the profile is stale: {why}{'' if show_only else '; measuring again'}")


def _measured(hardware: Hardware, model: str | None, rpc: tuple[str, ...]) -> Profile:
    from ..engine.handles import start
    from ..machine.measure import measure
    from ..open import find_model

    library = start()
    for endpoint in rpc:
        library.add_rpc(endpoint)
    path = None if model is None else find_model(model)[0]
    with show.status("measuring") as say:
        return measure(hardware, model=path, say=say)


def _print_profile(found: Profile) -> None:
    hardware = found.hardware
    cpu = hardware.cpu
    threads = sorted({rate.threads for rate in cpu.kernels})
    show.answer(f"{cpu.model}: {cpu.threads_reason}\nmeasured {found.measured} in {found.seconds:.1f} s\n\n")
    rows: list[list[object]] = [["memory, GB/s read", *(_rate(hardware.memory.read, n) for n in threads)]]
    for operation, title, field in (("matvec", "decode, GB/s of {} weights", "gbps"),
                                    ("matmul", "prefill, GFLOP/s with {}", "gflops"),
                                    ("attention-8192", "attention, GB/s of {} KV", "gbps")):  # fmt: skip
        for kind in dict.fromkeys(rate.type for rate in cpu.kernels if rate.operation == operation):
            by_threads = {
                r.threads: getattr(r, field) for r in cpu.kernels if (r.operation, r.type) == (operation, kind)
            }
            rows.append([title.format(kind), *(f"{by_threads[n]:.1f}" if n in by_threads else "-" for n in threads)])
    show.table("", ["", *(f"{n} threads" if n > 1 else "1 thread" for n in threads)], rows,
               right=tuple(range(1, len(threads) + 1)))  # fmt: skip
    for device, link in zip(hardware.devices, hardware.links, strict=False):
        show.answer(f"\n{device.name} {device.description}: {_number(device.read_gbps)} GB/s of its memory\n")
        show.answer(f"  link: {_number(link.to_device_pinned_gbps or link.to_device_gbps)} GB/s there, "
                    f"{_number(link.from_device_pinned_gbps or link.from_device_gbps)} back; a visit costs "
                    f"{_number(None if link.split_s is None else link.split_s * 1e6)} µs\n")  # fmt: skip
    if hardware.disk is not None:
        show.answer(f"\ndisk: {_number(hardware.disk.read_gbps)} GB/s\n")
    for note in hardware.notes:
        show.warning(note)


def _rate(rates: tuple[Any, ...], threads: int) -> str:
    return next((f"{rate.gbps:.1f}" for rate in rates if rate.threads == threads), "-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def tune_verb(model: str, place: PlaceFlags, flags: TuneFlags) -> int:
    """`hgguf tune`. The exit code."""
    from ..loader import prepare
    from ..machine.profile import check_can_write
    from ..tuned import Tuned, key_of, remember, tuned_path
    from .run import find_shown

    seconds, quality = flags.seconds, flags.quality
    if not 1 <= seconds <= 3600:
        raise UsageError(f"--seconds {seconds:g} is out of range", "give 1 to 3600")
    if not (math.isfinite(quality) and quality >= 0):
        raise UsageError(f"--quality {quality} is out of range", "give 0 or more")
    start = time.monotonic()
    limits = limits_of(place)
    path, _ = find_shown(model)
    check_can_write(tuned_path(), "HGGUF_DATA")
    prepared = prepare(path, limits, rpc=endpoints_of(place.rpc))
    left = seconds - _LAST_SECONDS - (time.monotonic() - start)
    found = _searched(prepared, limits, left, quality)
    result, best = found.search, found.search.best
    decode_tps, prompt_tps = (round(1 / best.median(name), 2) for name in ("decode_s", "prompt_s"))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    entry = Tuned(best.setting, decode_tps, prompt_tps, result.goal, found.depth, when)
    kept = remember(key_of(prepared.hardware, prepared.shape, limits), entry)
    report = _report(found, time.monotonic() - start) | {"file": str(kept)}
    if max((sample.busy for trial in result.trials for sample in trial.samples), default=0.0) > 0.5:
        show.warning("other processes were busy while this was measured: run it again when all is quiet")
    if flags.json:
        show.data(report)
    else:
        _print_tuned(report)
    return 0


@dataclass(frozen=True)
class _Searched:
    """`plan`: what was found, with its bytes; `predicted`: tokens/s predicted for a setting, None without a profile."""

    search: Search
    plan: Plan
    depth: int
    predicted: Callable[[Setting], Predicted | None]


def _searched(prepared: Prepared, limits: Limits, seconds: float, quality: float) -> _Searched:
    from ..machine.profile import with_known_rates
    from ..machine.rates import Rates
    from ..plan import predict
    from ..plan.cost import work_of
    from ..plan.inputs import device_budgets, host_budget
    from ..plan.types import ANSWER_TOKENS
    from ..tune.meter import EngineMeter
    from ..tune.places import Places, applied, may_vary
    from ..tune.search import axes_of, search, start_of
    from ..tuned import Place

    shape, plan, hardware = prepared.shape, prepared.plan, prepared.hardware
    work, rates = work_of(shape), Rates(with_known_rates(hardware)[0])
    budgets = {**device_budgets(hardware, limits), "CPU": host_budget(hardware, limits)}
    start, cpu, goal_depth = start_of(plan), hardware.cpu, limits.depth or 512
    if len(budgets) > 1 and may_vary(limits, plan):
        start = replace(start, place=Place.of(plan))
    with show.status("tuning") as say:
        say("reading weights")
        meter = EngineMeter(prepared, seconds, min(goal_depth, max(plan.context.n_ctx - ANSWER_TOKENS, 64)))
        try:
            asked = _Asked(prepared, meter.close)
            places = Places(plan, work, budgets, asked)
            around = None if start.place is None else places.around
            fitting = places.fitting if len(budgets) > 1 else list
            most = max(cpu.usable_threads, len(cpu.affinity) or cpu.logical)
            axes = axes_of(limits, most, _cache_types(shape), around, fitting)
            found = search(meter, start, axes, limits.goal, goal_depth, quality=quality, say=say)
        finally:
            meter.close()
        chosen = applied(plan, found.best.setting)
        chosen = replace(chosen, memory=asked([chosen])[0])
    depth = meter.depth
    return _Searched(found, chosen, depth, lambda s: predict(rates, work, applied(plan, s), depth))


class _Asked:
    """What plans take, by the engine's allocator in a child process. `release` closes what is open here: the child
    needs memory of the device too."""

    def __init__(self, prepared: Prepared, release: Callable[[], None]) -> None:
        self._prepared, self._release = prepared, release
        self._known: dict[object, tuple[MemoryUse, ...]] = {}

    def __call__(self, plans: Sequence[Draft]) -> list[tuple[MemoryUse, ...]]:
        from ..engine.child import Child
        from ..loader import oracle

        keys = [(plan.model, plan.context) for plan in plans]
        if any(key not in self._known for key in keys):
            self._release()
            with Child(self._prepared.rpc) as child:
                ask = oracle(child, self._prepared.shape, self._prepared.hardware)
                for key, plan in zip(keys, plans, strict=True):
                    self._known[key] = self._known.get(key) or ask(plan)
        return [self._known[key] for key in keys]


def _cache_types(shape: ModelShape) -> tuple[str, ...]:
    heads = {size for layer in shape.layers if layer.n_head_kv for size in (layer.head_k, layer.head_v)}
    return ("f16", "q8_0") if all(size % 32 == 0 for size in heads) else ("f16",)


def _report(found: _Searched, seconds: float) -> dict[str, Any]:
    result = found.search
    return {
        "plan": replace(found.plan, predicted=found.predicted(result.best.setting)).as_json(),
        "trials": [trial.as_json() | _predicted(found.predicted(trial.setting)) for trial in result.trials],
        "best": _speeds(result.best),
        "baseline": _speeds(result.start),
        "depth": found.depth,
        "goal": result.goal,
        "stopped": result.stopped,
        "seconds": round(seconds, 1),
    }


def _predicted(predicted: Predicted | None) -> dict[str, float | None]:
    tps = (None, None) if predicted is None else (predicted.decode_tps, predicted.prompt_tps)
    return {"decode_predicted": tps[0], "prompt_predicted": tps[1]}


def _speeds(trial: Trial) -> dict[str, float]:
    return {
        name: round(1 / trial.median(of), 2) for name, of in (("decode_tps", "decode_s"), ("prompt_tps", "prompt_s"))
    }


def _print_tuned(report: dict[str, Any]) -> None:
    names = ("threads", "threads_batch", "n_ubatch", "flash_attention", "type_k", "decode_tps", "decode_predicted",
             "prompt_tps", "prompt_predicted", "note")  # fmt: skip
    rows = [["-" if trial[name] is None else trial[name] for name in names] for trial in report["trials"]]
    for row, trial in zip(rows, report["trials"], strict=True):
        row[-1] = f"{trial['note']}: {trial['place']}" if trial["note"].startswith("placement") else trial["note"]
    columns = ("threads", "prefill", "batch", "flash", "KV", "decode/s", "predicted", "prefill/s", "predicted", "")
    show.table("", columns, rows, right=(0, 1, 2, 5, 6, 7, 8))
    best, start, plan = report["best"], report["baseline"], report["plan"]
    predicted = plan["predicted"]
    show.answer(
        f"\nbest      {best['decode_tps']} tokens/s decode, {best['prompt_tps']} prefill, at depth {report['depth']}\n"
        f"plan was  {start['decode_tps']} and {start['prompt_tps']}\n"
    )
    if predicted:
        show.answer(f"predicted {predicted['decode_tps']} and {predicted['prompt_tps']}\n")
    layers = f"-ngl {plan['n_gpu_layers']} " if plan["n_gpu_layers"] else ""
    show.answer(
        f"setting   {layers}-t {plan['threads']['decode']} -tb {plan['threads']['prompt']} "
        f"-b {plan['batch']['n_batch']} -ub {plan['batch']['n_ubatch']} -fa {plan['flash_attention']} "
        f"-ctk {plan['kv']['type_k']} -ctv {plan['kv']['type_v']}\n"
        f"remembered in {report['file']}; {report['stopped']} after {report['seconds']} s\n"
    )


def doctor_verb(flags: DoctorFlags) -> int:
    """`hgguf doctor`. 0, whatever is found: a finding is advice."""
    from ..engine.handles import start
    from ..machine import doctor
    from ..machine.doctor_facts import read_facts
    from ..machine.profile import load, with_profile

    problem, library = "", None
    try:
        library = start()
    except HgError as error:
        problem = error.what
    hardware, _ = with_profile(machine(endpoints_of(flags.rpc)), load()) if library else (_bare(), "")
    facts = read_facts(library, problem)
    findings = doctor.examine(hardware, facts)
    if flags.json:
        show.data({"findings": [finding.as_json() for finding in findings]})
        return 0
    for finding in findings:
        show.answer(f"{finding.what}\n  costs: {finding.cost}\n  says:  {finding.source}\n  fix:   {finding.mend}\n\n")
    show.answer(f"{len(findings)} finding{'' if len(findings) == 1 else 's'}\n" if findings else "nothing found\n")
    return 0


def _bare() -> Hardware:
    from ..machine.probe import read_hardware

    return read_hardware()
