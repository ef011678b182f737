"""(Hardware, ModelShape, Limits) → Plan: what will lie and run where, and why. Pure: no I/O, no clock, no engine.

Exact bytes come through `bytes_of`, a function that the caller gives: it answers for a candidate plan with what the
engine's allocator would take. The rule here is simple: the context the user asks for (or a stated default), then as many
layers on the device as its budget holds, found by bisection.
Invariant: what the user set is never changed, only refused; every number of the plan has a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .errors import DoesNotFit, UsageError
from .hardware import Hardware
from .shape import ModelShape
from .units import format_size

DEFAULT_CONTEXT = 8192
CONTEXT_STEP = 256  # the engine rounds a context up to a multiple of this (llama_context: GGML_PAD(n_ctx, 256))
HOST_MARGIN = 256 << 20
DEVICE_MARGIN = 256 << 20
_BLOCK = {"q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "iq4_nl": 32}


@dataclass(frozen=True)
class Limits:
    """What the user allows or fixes. None: the planner chooses. Bytes, tokens and counts."""

    n_ctx: int | None = None
    tokens_needed: int = 0
    n_gpu_layers: int | None = None
    vram: int | None = None
    ram: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    threads: int | None = None
    threads_batch: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    kv_offload: bool = True
    overrides: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    use_mmap: bool = True
    use_mlock: bool = False


@dataclass(frozen=True)
class Reason:
    """Why a number of the plan is what it is."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device ("CPU": host memory)."""

    device: str
    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True)
class KvPlan:
    """The KV cache: types of K and V, cells (tokens) in each tier, bytes of all of it."""

    type_k: str
    type_v: str
    cells_device: int
    cells_host: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What will be done. `memory` holds exact bytes by device; `reasons` says why, number by number."""

    n_ctx: int
    n_gpu_layers: int
    n_layers: int
    kv: KvPlan
    threads: int
    threads_batch: int
    n_batch: int
    n_ubatch: int
    flash_attention: str
    kv_offload: bool
    overrides: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    use_mmap: bool = True
    use_mlock: bool = False
    memory: tuple[MemoryUse, ...] = ()
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def bytes_host(self) -> int:
        return sum(use.total for use in self.memory if use.device == "CPU")

    @property
    def bytes_device(self) -> int:
        return sum(use.total for use in self.memory if use.device != "CPU")

    def as_json(self) -> dict[str, Any]:
        """The keys that `hgguf plan --json` promises."""
        return {
            "placement": [asdict(use) | {"total": use.total} for use in self.memory],
            "n_gpu_layers": self.n_gpu_layers,
            "n_layers": self.n_layers,
            "n_ctx": self.n_ctx,
            "kv": asdict(self.kv),
            "threads": {"decode": self.threads, "prompt": self.threads_batch},
            "batch": {"n_batch": self.n_batch, "n_ubatch": self.n_ubatch},
            "flash_attention": self.flash_attention,
            "overrides": [list(pair) for pair in self.overrides],
            "bytes": {"device": self.bytes_device, "host": self.bytes_host},
            "predicted": None,
            "reasons": [asdict(reason) for reason in self.reasons],
            "warnings": list(self.warnings),
        }

    def as_arguments(self) -> tuple[str, ...]:
        """The plan as flags of stock llama.cpp's programs, `--fit off` so that it changes nothing."""
        arguments = ["--fit", "off", "-c", str(self.n_ctx), "-ngl", str(self.n_gpu_layers), "-t", str(self.threads),
                     "-tb", str(self.threads_batch), "-b", str(self.n_batch), "-ub", str(self.n_ubatch),
                     "-ctk", self.kv.type_k, "-ctv", self.kv.type_v, "-fa", self.flash_attention]  # fmt: skip
        arguments += [] if self.kv_offload else ["-nkvo"]
        for pattern, buffer_type in self.overrides:
            arguments += ["-ot", f"{pattern}={buffer_type}"]
        arguments += ["-dev", ",".join(self.devices)] if self.devices else []
        arguments += ["-ts", ",".join(f"{share:g}" for share in self.tensor_split)] if self.tensor_split else []
        arguments += ["-sm", self.split_mode] if self.split_mode != "layer" else []
        arguments += [] if self.use_mmap else ["--no-mmap"]
        return (*arguments, "--mlock") if self.use_mlock else tuple(arguments)


BytesOf = Callable[[Plan], tuple[MemoryUse, ...]]


@dataclass
class _Notes:
    """Reasons and warnings while a plan is being made."""

    reasons: list[Reason] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def because(self, name: str, value: object, why: str) -> None:
        self.reasons.append(Reason(name, str(value), why))


def make_plan(hardware: Hardware, shape: ModelShape, limits: Limits, bytes_of: BytesOf) -> Plan:
    """The plan for these limits. Raises UsageError for settings that cannot go together, DoesNotFit when nothing fits."""
    notes = _Notes()
    check_limits(shape, limits)
    candidate = _fixed_part(hardware, shape, limits, notes)
    candidate = _choose_context(hardware, shape, limits, candidate, bytes_of, notes)
    candidate = _choose_layers(hardware, shape, limits, candidate, bytes_of, notes)
    used = bytes_of(candidate)
    _check_host(hardware, limits, candidate, used, bytes_of)
    kv = sum(use.kv for use in used)
    on_device = sum(use.kv for use in used if use.device != "CPU")
    cells_device = candidate.n_ctx if kv and on_device == kv else round(candidate.n_ctx * on_device / kv) if kv else 0
    _explain_memory(used, notes)
    return replace(
        candidate,
        kv=replace(candidate.kv, cells_device=cells_device, cells_host=candidate.n_ctx - cells_device, bytes=kv),
        memory=used,
        reasons=tuple(notes.reasons),
        warnings=tuple(notes.warnings),
    )


def check_limits(shape: ModelShape, limits: Limits) -> None:
    """Settings that make no sense or cannot go together, named before anything is loaded. Raises UsageError."""
    positive = (("-c", limits.n_ctx), ("-b", limits.n_batch), ("-ub", limits.n_ubatch), ("--vram", limits.vram),
                ("--ram", limits.ram), ("-t", limits.threads), ("-tb", limits.threads_batch))  # fmt: skip
    for flag, value in positive:
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is out of range", f"{flag} must be at least 1")
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


def _fixed_part(hardware: Hardware, shape: ModelShape, limits: Limits, notes: _Notes) -> Plan:
    """Threads, batches and what the user fixed; context and layers are still open."""
    usable = hardware.cpu.usable_threads
    threads = limits.threads or usable
    notes.because("threads", threads, "set by the user" if limits.threads else hardware.cpu.threads_reason)
    if threads > usable:
        notes.warnings.append(f"{threads} threads on {usable} usable cores will be slower than {usable}")
    n_ubatch = limits.n_ubatch or min(512, limits.n_batch or 512)
    n_batch = max(limits.n_batch or 2048, n_ubatch) if limits.n_batch is None else limits.n_batch
    if n_ubatch > n_batch:
        raise UsageError(f"-ub {n_ubatch} is larger than -b {n_batch}", "make -b at least as large as -ub")
    notes.because("n_ubatch", n_ubatch, "set by the user" if limits.n_ubatch else "the engine's default")
    notes.because("kv type", f"{limits.type_k}/{limits.type_v}", "full precision unless -ctk/-ctv say otherwise")
    return Plan(
        n_ctx=0,
        n_gpu_layers=0,
        n_layers=shape.n_layers,
        kv=KvPlan(limits.type_k, limits.type_v, 0, 0, 0),
        threads=threads,
        threads_batch=limits.threads_batch or threads,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        flash_attention=limits.flash_attention,
        kv_offload=limits.kv_offload,
        overrides=limits.overrides,
        devices=limits.devices,
        split_mode=limits.split_mode,
        main_gpu=limits.main_gpu,
        tensor_split=limits.tensor_split,
        use_mmap=limits.use_mmap,
        use_mlock=limits.use_mlock,
    )


def _round_context(n_ctx: int) -> int:
    return -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP


def _choose_context(
    hardware: Hardware, shape: ModelShape, limits: Limits, plan: Plan, bytes_of: BytesOf, notes: _Notes
) -> Plan:
    trained = shape.n_ctx_train or DEFAULT_CONTEXT
    if limits.n_ctx is not None:
        n_ctx = _round_context(limits.n_ctx)
        rounded = (
            "" if n_ctx == limits.n_ctx else f", rounded up from {limits.n_ctx} to the engine's step of {CONTEXT_STEP}"
        )
        notes.because("n_ctx", n_ctx, f"set by the user{rounded}")
        if n_ctx > _round_context(trained):
            notes.warnings.append(f"context {n_ctx} is above the {trained} tokens that this model was trained for")
        return replace(plan, n_ctx=n_ctx)
    wanted = _round_context(max(DEFAULT_CONTEXT, limits.tokens_needed))
    n_ctx = min(wanted, _round_context(trained))
    why = f"the default of {DEFAULT_CONTEXT}" if wanted == DEFAULT_CONTEXT else "prompt and answer need it"
    if n_ctx < wanted:
        why = f"the {trained} tokens that this model was trained for"
    room = largest_context(hardware, limits, replace(plan, n_ctx=n_ctx), bytes_of)
    if room < n_ctx:
        notes.because("n_ctx", room, f"capped by free memory ({format_size(host_budget(hardware, limits))})")
        notes.warnings.append(f"context capped to {room} tokens by free memory")
        return replace(plan, n_ctx=room)
    notes.because("n_ctx", n_ctx, f"{why}; -c sets another")
    return replace(plan, n_ctx=n_ctx)


def host_budget(hardware: Hardware, limits: Limits) -> int:
    """Bytes of host memory that a plan may take: free memory less a margin, or --ram when that is less."""
    free = max(hardware.memory.available - HOST_MARGIN, 0)
    return min(free, limits.ram) if limits.ram is not None else free


def largest_context(hardware: Hardware, limits: Limits, plan: Plan, bytes_of: BytesOf) -> int:
    """The largest context, at most the plan's, whose bytes fit into host memory; 0 when not even the smallest does."""
    budget = host_budget(hardware, limits)

    def fits(steps: int) -> bool:
        return _host_bytes(bytes_of(replace(plan, n_ctx=steps * CONTEXT_STEP))) <= budget

    return largest(plan.n_ctx // CONTEXT_STEP, fits) * CONTEXT_STEP


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..upper with fits(n), for a monotone `fits`; 0 when there is none. Asks log2(upper) times."""
    if upper < 1 or fits(upper):
        return max(upper, 0)
    low, high = 0, upper
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _host_bytes(used: tuple[MemoryUse, ...]) -> int:
    return sum(use.total for use in used if use.device == "CPU")


def _choose_layers(
    hardware: Hardware, shape: ModelShape, limits: Limits, plan: Plan, bytes_of: BytesOf, notes: _Notes
) -> Plan:
    every = shape.n_layers + 1  # the output counts as a layer
    budgets = device_budgets(hardware, limits)
    if not budgets:
        return _without_device(limits, plan, notes)

    def fits(layers: int) -> bool:
        used = bytes_of(replace(plan, n_gpu_layers=layers))
        return all(use.total <= budgets.get(use.device, 0) for use in used if use.device != "CPU")

    if limits.n_gpu_layers is not None:
        layers = every if limits.n_gpu_layers < 0 else min(limits.n_gpu_layers, every)
        if limits.vram is not None and layers and not fits(layers):
            best = largest(every, fits)
            raise DoesNotFit(
                f"{layers} layers need more than the --vram of {format_size(limits.vram)}",
                f"{best} layers would fit: -ngl {best}",
                {"n_gpu_layers": best},
            )
        notes.because("n_gpu_layers", layers, "set by the user")
        return replace(plan, n_gpu_layers=layers)
    layers = largest(every, fits)
    room = ", ".join(f"{name} {format_size(budget)}" for name, budget in budgets.items())
    notes.because("n_gpu_layers", layers, f"{'all' if layers == every else 'as many as'} fit into {room}")
    return replace(plan, n_gpu_layers=layers)


def _without_device(limits: Limits, plan: Plan, notes: _Notes) -> Plan:
    why = "this engine has no GPU backend, or it sees no device"
    if limits.vram is not None:
        raise DoesNotFit(f"--vram was given, but there is no device: {why}", "leave out --vram, or see `hgguf engine`")
    if limits.n_gpu_layers:
        notes.warnings.append(f"-ngl {limits.n_gpu_layers} has no effect, nothing is offloaded: {why}")
    notes.because("n_gpu_layers", 0, why)
    return plan


def device_budgets(hardware: Hardware, limits: Limits) -> dict[str, int]:
    """Bytes that may be taken of each device: its free memory less a margin, or --vram when that is less."""
    chosen = [d for d in hardware.devices if d.kind != "cpu" and (limits.devices is None or d.name in limits.devices)]
    free = {device.name: max(device.memory_free - DEVICE_MARGIN, 0) for device in chosen}
    return {name: min(size, limits.vram) if limits.vram is not None else size for name, size in free.items()}


def _check_host(hardware: Hardware, limits: Limits, plan: Plan, used: tuple[MemoryUse, ...], bytes_of: BytesOf) -> None:
    needed, budget = _host_bytes(used), host_budget(hardware, limits)
    if needed <= budget:
        return
    room = largest_context(hardware, limits, plan, bytes_of)
    limit = "--ram" if limits.ram is not None and budget == limits.ram else "free memory"
    what = (
        f"a context of {plan.n_ctx} tokens needs {format_size(needed)} of memory, and {limit} is {format_size(budget)}"
    )
    if room:
        raise DoesNotFit(what, f"{room} tokens would fit: -c {room}", {"n_ctx": room})
    raise DoesNotFit(what, "not even the smallest context fits: use a smaller model or quantization")


def _explain_memory(used: tuple[MemoryUse, ...], notes: _Notes) -> None:
    for use in used:
        parts = f"weights {format_size(use.weights)}, KV {format_size(use.kv)}, scratch {format_size(use.compute)}"
        notes.because(f"memory {use.device}", format_size(use.total), f"{parts}; counted by the engine's allocator")
