"""Path → plan → open model and context. The one place where plans meet the engine; undoes everything on failure.

Invariant: no weight is read before the file has passed the engine's own checks in a child process, and nothing stays
open when `open_model` raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .changes import changed_file, with_unused
from .closing import Closing
from .engine.child import Child
from .engine.device_sample import DeviceSample
from .engine.handles import Context, Model, start
from .errors import BadFile, DoesNotFit, EngineError
from .machine.hardware import Device, Hardware
from .machine.probe import read_hardware
from .machine.profile import NOT_MEASURED, with_known_rates
from .model_file.kinds import check_writes
from .model_file.shape import ModelShape, shape_of
from .model_file.split import open_model_file
from .model_file.validation import vocabulary_problems
from .plan import BytesOf, Draft, Limits, MemoryUse, Plan, Reason, make_plan
from .plan.inputs import device_budgets
from .plan.search import excess
from .settings import BufferBytes, ContextSettings, ModelSettings
from .tuned import placed, with_tuned
from .vocabulary import Vocabulary

_MOST_CELLS = 1 << 23  # llama_kv_cells keeps some 50 bytes for a cell besides K and V: 0.4 GB


@dataclass(frozen=True)
class Prepared:
    """A plan and what it was made from; nothing is open."""

    path: Path
    hardware: Hardware
    shape: ModelShape
    plan: Plan
    rpc: tuple[str, ...] = ()


def prepare(
    path: Path, limits: Limits, *, rpc: Sequence[str] = (), use_tuned: bool = False, prompt: str = ""
) -> Prepared:
    """Reads the header, checks the file in a child process and plans, with the rates of a profile if there is one.

    `use_tuned`: where `limits` leave a choice, take what `hgguf tune` found. `prompt`: a text whose tokens are counted
    and added to `limits.tokens_needed`. Raises HgErrors of every kind.
    """
    file = changed_file(open_model_file(path), limits)
    check_writes(file)
    shape = shape_of(file)
    if not shape.n_layers:
        raise BadFile(f"{path} holds no language model (architecture {shape.architecture})", "see `hgguf inspect`")
    with Child(rpc) as child:
        hardware, stale = with_known_rates(with_engine_devices(read_hardware(), child))
        bytes_of = oracle(child, shape, hardware)
        if prompt:
            limits = replace(limits, tokens_needed=limits.tokens_needed + _count(child, shape, prompt))
        try:
            plan = _tuned_plan(hardware, shape, limits, bytes_of) if use_tuned else None
            plan = plan or make_plan(hardware, shape, limits, bytes_of)
        except EngineError:
            for problem in vocabulary_problems(shape.file):  # our words, where we know what the engine stumbled over
                raise BadFile(f"{path}: {problem}", "`hgguf validate` checks a file in full") from None
            raise
        plan = with_unused(plan, limits, child.overridden)
    return Prepared(path, hardware, shape, _with_note(plan, stale), tuple(rpc))


def _count(child: Child, shape: ModelShape, text: str) -> int:
    try:
        return child.count_tokens(shape.file.path, text)
    except EngineError:  # planning says in better words what is wrong with the file
        return len(text.encode())


def _with_note(plan: Plan, why: str) -> Plan:
    """The plan with why a profile was not used, or should be measured again, as the reason for its prediction."""
    if not why:
        return plan
    kept = tuple(reason for reason in plan.reasons if (reason.name, reason.value) != ("predicted", "unknown"))
    reason = Reason("predicted", "unknown" if plan.predicted is None else "by an old profile", why)
    warnings = () if why == NOT_MEASURED else (why,)
    return replace(plan, reasons=(*kept, reason), warnings=plan.warnings + warnings)


def _tuned_plan(hardware: Hardware, shape: ModelShape, limits: Limits, bytes_of: BytesOf) -> Plan | None:
    """The plan with what `hgguf tune` found, or None. A placement counts for the context that it was tuned for, and
    where as much memory is free now as was then; otherwise it is planned anew."""
    tuned, found = with_tuned(limits, hardware, shape)
    if found is None:
        return None
    plan, place = make_plan(hardware, shape, tuned, bytes_of), found.setting.place
    with_place = placed(tuned, place)
    if with_place is not None and place is not None and place.n_ctx == plan.context.n_ctx:
        with suppress(DoesNotFit):
            again = make_plan(hardware, shape, with_place, bytes_of)
            plan = plan if excess(again.memory, device_budgets(hardware, limits)) else again
    reason = Reason("tune", "used", f"tuned on {found.when[:10]}; --no-tuned ignores it")
    return replace(plan, reasons=(*plan.reasons, reason))


def with_engine_devices(hardware: Hardware, child: Child) -> Hardware:
    """The hardware with the devices that this engine can use instead of those that the system lists."""
    seen = [device for device in child.devices() if device.kind in ("gpu", "igpu")]
    known = {device.name: device for device in hardware.devices}
    devices = tuple(
        replace(
            known.get(d.name, Device(name=d.name, kind="rpc" if d.name.startswith("RPC") else "gpu")),
            memory_free=d.memory_free,
            memory_total=d.memory_total,
            buffer_type=d.buffer_type,
        )
        for d in seen
    )
    return replace(hardware, devices=devices)


def oracle(child: Child, shape: ModelShape, hardware: Hardware) -> BytesOf:
    """Exact bytes for a candidate plan, each asked for once."""
    known: dict[tuple[ModelSettings, ContextSettings], tuple[MemoryUse, ...]] = {}
    machine = hardware.memory.total + sum(device.memory_total for device in hardware.devices)

    def bytes_of(draft: Draft) -> tuple[MemoryUse, ...]:
        key = draft.model, draft.context
        if key not in known:
            guess = _forecast(shape, draft.context)
            # Counting takes memory for each cell, so a context that no machine of this size holds is not asked about.
            absurd = guess[0].total > machine or draft.context.n_ctx > _MOST_CELLS
            known[key] = guess if absurd else by_device(child.memory(shape.file.path, *key)) or guess
        return known[key]

    return bytes_of


def _forecast(shape: ModelShape, context: ContextSettings) -> tuple[MemoryUse, ...]:
    """For an engine that cannot count (no patches): from the header, everything on the host."""
    kv = shape.kv_bytes(context.n_ctx, context.type_k, context.type_v, context.n_ubatch)
    return (MemoryUse("CPU", shape.bytes_weights, kv, 4 * context.n_ubatch * shape.n_vocab),)


def by_device(buffers: Sequence[BufferBytes]) -> tuple[MemoryUse, ...]:
    """Buffer types summed by where they lie: host memory of any kind is "CPU"."""
    sums: dict[str, tuple[int, int, int]] = {}
    for entry in buffers:
        name = "CPU" if entry.is_host else entry.device
        weights, kv, compute = sums.get(name, (0, 0, 0))
        sums[name] = (weights + entry.model, kv + entry.context, compute + entry.compute)
    return tuple(MemoryUse(name, *values) for name, values in sorted(sums.items()))


class OpenModel(Closing):
    """An open model and context, with the plan they were opened by."""

    def __init__(self, prepared: Prepared, model: Model, context: Context, load_s: float) -> None:
        self.plan = prepared.plan
        self.shape = prepared.shape
        self.model = model
        self.context = context
        self.vocabulary = Vocabulary(prepared.shape, model)
        self.load_s = load_s

    def device_sample(self, count: int, probabilities: bool) -> DeviceSample | None:
        """The `count` largest logits found on the device of the output layer; None where that is the CPU, or the engine
        cannot, or HGGUF_DEVICE_SAMPLER=off."""
        devices = self.model.layer_devices()
        if os.environ.get("HGGUF_DEVICE_SAMPLER") == "off" or not devices or devices[-1] == "CPU":
            return None
        try:
            return self.context.device_sample(count, probabilities)
        except EngineError:
            return None

    def memory(self) -> tuple[MemoryUse, ...]:
        """What was really allocated, by device."""
        return by_device(self.context.memory_use())

    def close(self) -> None:
        self.context.close()
        self.model.close()


def open_model(prepared: Prepared, progress: Callable[[float], bool] | None = None) -> OpenModel:
    """Opens what was planned. `progress` gets the share read (0 to 1) and may return False to stop."""
    start = time.perf_counter()
    with ExitStack() as undo:
        model = undo.enter_context(open_weights(prepared, prepared.plan.model, progress))
        context = undo.enter_context(Context(model, prepared.plan.context))
        opened = OpenModel(prepared, model, context, time.perf_counter() - start)
        undo.pop_all()
    return opened


def open_weights(prepared: Prepared, settings: ModelSettings, progress: Callable[[float], bool] | None = None) -> Model:
    """The model alone, placed as `settings` say."""
    for endpoint in prepared.rpc:
        _add_rpc_once(endpoint)
    return Model(prepared.shape.file.path, settings, progress=progress)


_added: set[str] = set()


def _add_rpc_once(endpoint: str) -> None:
    if endpoint not in _added:
        start().add_rpc(endpoint)
        _added.add(endpoint)
