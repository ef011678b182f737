"""(Hardware, ModelShape, Limits) → Plan: what will lie and run where, and why. Pure: no I/O, no clock, no engine.

The context the user asks for (or a stated default), then the placement that `plan_devices` finds fastest under the
budgets. Exact bytes come through `bytes_of`, a function that the caller gives: it answers for a candidate plan with
what the engine's allocator would take. Each question costs a tenth of a second or more, so few are asked.
Invariant: what the user set is never changed, only refused; no budget is exceeded; every number has a reason.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import DoesNotFit, UsageError
from ..machine.hardware import Hardware
from ..machine.rates import CPU, Rates, Use
from ..model_file.shape import ModelShape
from ..units import format_size
from .border import with_border
from .choose import choose_placement
from .cost import CostModel, ModelWork, PartCost, Predicted, total, work_of
from .inputs import BytesOf, Given, Notes, depth_of, host_budget, largest, use_of
from .tiers import with_tiers
from .types import GOALS, KvPlan, Limits, MemoryUse, Plan

DEFAULT_CONTEXT = 8192
CONTEXT_STEP = 256  # the engine rounds a context up to a multiple of this (llama_context: GGML_PAD(n_ctx, 256))
_MOST_TOKENS, _MOST_BATCH, _MOST_THREADS = (1 << 31) - CONTEXT_STEP, 1 << 20, 1024  # the engine's counts are 32 bits
_BLOCK = {"q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "iq4_nl": 32}


def make_plan(hardware: Hardware, shape: ModelShape, limits: Limits, bytes_of: BytesOf) -> Plan:
    """The plan for these limits. Raises UsageError for settings that exclude each other, DoesNotFit when none fits."""
    check_limits(shape, limits)
    given = Given(hardware, shape, limits, bytes_of, Rates(hardware), work_of(shape), Notes())
    plan = choose_placement(given, with_tiers(given, _wanted_context(given, _fixed_part(given))))
    plan, used = _fit_host(given, plan)
    plan = with_border(given, plan)
    kv = sum(use.kv for use in used)
    on_device = sum(use.kv for use in used if use.device != CPU)
    cells_device = plan.n_ctx if kv and on_device == kv else round(plan.n_ctx * on_device / kv) if kv else 0
    if plan.placement.tier_cells is not None:
        cells_device = min(plan.placement.tier_cells, plan.n_ctx)
    cells = replace(plan.kv, cells_device=cells_device, cells_host=plan.n_ctx - cells_device, bytes=kv)
    _explain_memory(used, given.notes)
    predicted = predict(given.rates, given.work, plan, depth_of(given, plan))
    _explain_prediction(predicted, given.notes)
    reasons, warnings = tuple(given.notes.reasons), tuple(given.notes.warnings)
    return replace(plan, kv=cells, memory=used, predicted=predicted, reasons=reasons, warnings=warnings)


def check_limits(shape: ModelShape, limits: Limits) -> None:
    """Settings that make no sense or cannot go together, named before anything is loaded. Raises UsageError."""
    counts = (("-c", limits.n_ctx, _MOST_TOKENS), ("-b", limits.n_batch, _MOST_BATCH),
              ("-ub", limits.n_ubatch, _MOST_BATCH), ("--vram", limits.vram, None), ("--ram", limits.ram, None),
              ("-t", limits.threads, _MOST_THREADS), ("-tb", limits.threads_batch, _MOST_THREADS))  # fmt: skip
    for flag, value, most in counts:
        if value is not None and (value < 1 or (most is not None and value > most)):
            raise UsageError(f"{flag} {value} is out of range", f"give {f'1 to {most}' if most else 'more than 0'}")
    if limits.depth is not None and limits.depth < 0:
        raise UsageError(f"--depth {limits.depth} is out of range", "give the tokens expected in the context")
    if limits.goal not in GOALS:
        raise UsageError(f"--goal {limits.goal} is not known", f"one of: {', '.join(GOALS)}")
    if limits.flash_attention == "off" and limits.type_v in _BLOCK:
        raise UsageError(
            f"-ctv {limits.type_v} needs flash attention, and -fa off turns it off",
            "leave out -fa off, or use -ctv f16",
        )
    for flag, type_name, head in _head_sizes(shape, limits):
        if head % _BLOCK.get(type_name, 1):
            raise UsageError(
                f"{flag} {type_name} stores blocks of {_BLOCK[type_name]} values, and this model's heads have {head}",
                f"use {flag} f16",
            )


def _head_sizes(shape: ModelShape, limits: Limits) -> list[tuple[str, str, int]]:
    sizes = {("-ctk", limits.type_k, layer.head_k) for layer in shape.layers if layer.n_head_kv}
    return sorted(sizes | {("-ctv", limits.type_v, layer.head_v) for layer in shape.layers if layer.n_head_kv})


# --- threads, batches, context ---


def _fixed_part(given: Given) -> Plan:
    """Threads, batches and what the user fixed; context and placement are still open."""
    limits, notes = given.limits, given.notes
    threads, threads_batch = _choose_threads(given)
    n_ubatch = limits.n_ubatch or min(512, limits.n_batch or 512)
    n_batch = max(limits.n_batch or 2048, n_ubatch) if limits.n_batch is None else limits.n_batch
    if n_ubatch > n_batch:
        raise UsageError(f"-ub {n_ubatch} is larger than -b {n_batch}", "make -b at least as large as -ub")
    notes.because("n_ubatch", n_ubatch, "set by the user" if limits.n_ubatch else "the engine's default")
    notes.because("kv type", f"{limits.type_k}/{limits.type_v}", "full precision unless -ctk/-ctv say otherwise")
    return Plan(
        n_ctx=0,
        n_gpu_layers=0,
        n_layers=given.shape.n_layers,
        kv=KvPlan(limits.type_k, limits.type_v, 0, 0, 0),
        threads=threads,
        threads_batch=threads_batch,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        flash_attention=limits.flash_attention,
        n_outputs=limits.n_outputs,
        placement=limits.placement,
    )


def _choose_threads(given: Given) -> tuple[int, int]:
    """Threads for writing and for reading: all usable ones, unless fewer were measured to be clearly faster."""
    limits, cpu, notes = given.limits, given.hardware.cpu, given.notes
    usable = cpu.usable_threads
    chosen = []
    for name, fixed, reading in (("threads", limits.threads, False), ("threads_batch", limits.threads_batch, True)):
        count, why = fixed or usable, "set by the user" if fixed else cpu.threads_reason
        if fixed is None and reading and limits.threads:
            count, why = limits.threads, "as for writing"
        elif fixed is None and given.rates.measured:
            best = _fastest_threads(given, usable, reading=reading)
            if best != usable:
                count, why = best, f"predicted to be faster than {usable}, from this machine's profile"
        notes.because(name, count, why)
        chosen.append(count)
        if fixed and fixed > usable and not reading:
            notes.warnings.append(f"{fixed} threads on {usable} usable cores will be slower than {usable}")
    return chosen[0], chosen[1]


def _fastest_threads(given: Given, usable: int, *, reading: bool) -> int:
    def seconds(threads: int) -> float:
        use = Use(2048, given.limits.type_k, given.limits.type_v, threads, threads, 512)
        model = CostModel(given.rates, given.work, use)
        return sum(c.mixer + c.cache + c.heavy for c in (model.reading(CPU) if reading else model.writing(CPU)))

    counts = sorted({min(count, usable) for count in given.rates.thread_counts()} | {usable})
    best = min(counts, key=seconds)
    return best if seconds(best) < 0.95 * seconds(usable) else usable


def _round_context(n_ctx: int) -> int:
    return -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP


def _wanted_context(given: Given, plan: Plan) -> Plan:
    """The context before memory is looked at."""
    limits, notes = given.limits, given.notes
    trained = given.shape.n_ctx_train or DEFAULT_CONTEXT
    if limits.n_ctx is not None:
        n_ctx = _round_context(limits.n_ctx)
        step = f", rounded up from {limits.n_ctx} to the engine's step of {CONTEXT_STEP}"
        notes.because("n_ctx", n_ctx, f"set by the user{'' if n_ctx == limits.n_ctx else step}")
        if n_ctx > _round_context(trained):
            notes.warnings.append(f"context {n_ctx} is above the {trained} tokens that this model was trained for")
        return replace(plan, n_ctx=n_ctx)
    wanted = _round_context(max(DEFAULT_CONTEXT, limits.tokens_needed))
    n_ctx = min(wanted, _round_context(trained))
    why = f"the default of {DEFAULT_CONTEXT}" if wanted == DEFAULT_CONTEXT else "prompt and answer need it"
    if n_ctx < wanted:
        why = f"the {trained} tokens that this model was trained for"
    notes.because("n_ctx", n_ctx, f"{why}; -c sets another")
    return replace(plan, n_ctx=n_ctx)


# --- host memory ---


def largest_context(hardware: Hardware, limits: Limits, plan: Plan, bytes_of: BytesOf) -> int:
    """The largest context, at most the plan's, whose bytes fit into host memory; 0 when not even the smallest does."""
    budget = host_budget(hardware, limits)

    def fits(steps: int) -> bool:
        return _host_bytes(bytes_of(replace(plan, n_ctx=steps * CONTEXT_STEP))) <= budget

    return largest(plan.n_ctx // CONTEXT_STEP, fits) * CONTEXT_STEP


def _host_bytes(used: tuple[MemoryUse, ...]) -> int:
    return sum(use.total for use in used if use.device == CPU)


def _fit_host(given: Given, plan: Plan) -> tuple[Plan, tuple[MemoryUse, ...]]:
    """The plan with its exact bytes; with a smaller context where host memory needs it and the user left that open."""
    used = given.bytes_of(plan)
    needed, budget = _host_bytes(used), host_budget(given.hardware, given.limits)
    if needed <= budget:
        return plan, used
    room = largest_context(given.hardware, given.limits, plan, given.bytes_of)
    limit = "--ram" if given.limits.ram is not None and budget == given.limits.ram else "free memory"
    if room and given.limits.n_ctx is None:
        given.notes.instead("n_ctx", room, f"capped by {limit} ({format_size(budget)})")
        given.notes.warnings.append(f"context capped to {room} tokens by {limit}")
        capped = replace(plan, n_ctx=room)
        return capped, given.bytes_of(capped)
    what = (
        f"a context of {plan.n_ctx} tokens needs {format_size(needed)} of memory, and {limit} is {format_size(budget)}"
    )
    if room:
        raise DoesNotFit(what, f"{room} tokens would fit: -c {room}", {"n_ctx": room})
    raise DoesNotFit(what, "not even the smallest context fits: use a smaller model or quantization")


# --- predictions and reasons ---


def predict(rates: Rates, work: ModelWork, plan: Plan, depth: int) -> Predicted | None:
    """Tokens a second of a plan, or None where the machine was not measured."""
    place = plan.placement
    names = rates.devices() if place.devices is None else place.devices
    devices = names if plan.n_gpu_layers else ()
    if not rates.measured or any(not rates.is_measured(device) for device in devices):
        return None
    counts = tuple(int(share) for share in place.tensor_split) or (plan.n_gpu_layers,)
    if len(counts) != len(devices) and plan.n_gpu_layers:
        return None  # the engine shares layers out by free memory
    places = [CPU] * (plan.n_layers + 1 - sum(counts))
    for device, count in zip(devices, counts, strict=False):
        places += [device] * count
    heavy = heavy_on_host(plan)
    model = CostModel(rates, work, use_of(plan, max(depth, 1)))
    crossing = {device: rates.crossing(device) for device in devices}
    per_batch = {device: seconds / min(plan.n_ubatch, max(depth, 1)) for device, seconds in crossing.items()}
    gpu = next((device for device in devices if rates.computes_host_weights(device)), None)
    used = {CPU, *devices}
    writing: dict[str, list[PartCost]] = {place: model.writing(place) for place in used}
    reading: dict[str, list[PartCost]] = {place: model.reading(place, gpu) for place in used}
    answer = total(writing, places, heavy, crossing) + model.fixed
    prompt = total(reading, places, heavy, per_batch) + model.fixed / min(plan.n_ubatch, max(depth, 1))
    return Predicted(round(1 / answer, 2), round(1 / prompt, 2), depth)


def heavy_on_host(plan: Plan) -> frozenset[int]:
    """Layers whose heavy part the plan's own patterns keep on the CPU, the output as the last."""
    numbers: list[int] = []
    for pattern, _ in plan.placement.overrides:
        if pattern.startswith("^("):
            numbers.append(plan.n_layers)
        inside = pattern.partition("blk\\.(")[2].partition(")")[0]
        numbers += [int(part) for part in inside.split("|") if part.isdigit()]
    return frozenset(numbers)


def _explain_memory(used: tuple[MemoryUse, ...], notes: Notes) -> None:
    for use in (use for use in used if use.total):
        parts = f"weights {format_size(use.weights)}, KV {format_size(use.kv)}, scratch {format_size(use.compute)}"
        notes.because(f"memory {use.device}", format_size(use.total), f"{parts}; counted by the engine's allocator")


def _explain_prediction(predicted: Predicted | None, notes: Notes) -> None:
    if predicted is None:
        notes.because("predicted", "unknown", "this machine was not measured: run `hgguf profile`")
        return
    at = f"at {predicted.depth} tokens of context, from this machine's profile"
    notes.because("predicted", f"{predicted.decode_tps:.1f} tokens/s to write", at)
    notes.because("predicted", f"{predicted.prompt_tps:.1f} tokens/s to read", at)
