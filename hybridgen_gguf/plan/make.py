"""(Hardware, ModelShape, Limits) → Plan: what will lie and run where, and why. Pure: no I/O, no clock, no engine.

The context the user asks for (or a stated default), then the placement that `choose` finds fastest under the
budgets. Exact bytes come through `bytes_of`, a function that the caller gives: it answers for a candidate draft with
what the engine's allocator would take. Each question costs a tenth of a second or more, so few are asked.
Invariant: what the user set is never changed, only refused; no budget is exceeded; every number has a reason.
"""

from __future__ import annotations

from ..errors import DoesNotFit, UsageError
from ..machine.hardware import Hardware
from ..machine.rates import CPU, Rates
from ..model_file.shape import ModelShape
from ..settings import CELL_STEP, ContextSettings, ModelSettings
from ..units import format_size, round_up
from .border import with_border
from .check import check_limits
from .choose import choose_placement
from .cost import work_of
from .explain import explain_lock, explain_memory, explain_prediction
from .idle import note_idle
from .inputs import BytesOf, Given, Notes, depth_of, host_budget, host_limit, largest
from .predict import predict
from .threads import choose_threads
from .tiers import with_tiers
from .types import Draft, KvPlan, Limits, MemoryUse, Plan

DEFAULT_CONTEXT = 8192


def make_plan(hardware: Hardware, shape: ModelShape, limits: Limits, bytes_of: BytesOf) -> Plan:
    """The plan for these limits. Raises UsageError for settings that exclude each other, DoesNotFit when none fits."""
    check_limits(shape, limits)
    given, notes = Given(hardware, shape, limits, bytes_of, Rates(hardware), work_of(shape)), Notes()
    note_idle(given, notes)
    draft = choose_placement(given, notes, with_tiers(given, notes, _first_draft(given, notes)))
    draft, used = _fit_host(given, notes, draft)
    draft = with_border(given, notes, draft)
    explain_memory(used, notes)
    explain_lock(given, used, notes)
    predicted = predict(given.rates, given.work, draft, depth_of(limits, draft.context.n_ctx))
    explain_prediction(predicted, notes)
    reasons, warnings = tuple(notes.reasons), tuple(notes.warnings)
    kv = _cells(draft.context, used)
    return Plan(draft.model, draft.context, shape.n_layers, kv, used, predicted, reasons, warnings)


def _cells(context: ContextSettings, used: tuple[MemoryUse, ...]) -> KvPlan:
    """Where the cells are: by their tiers, or by the bytes on each side."""
    kv, on_device = sum(use.kv for use in used), sum(use.kv for use in used if use.device != CPU)
    cells = context.n_ctx if kv and on_device == kv else round(context.n_ctx * on_device / kv) if kv else 0
    if context.placement.tiers is not None:
        cells = min(context.placement.tiers.cells, context.n_ctx)
    return KvPlan(cells, context.n_ctx - cells, kv)


# --- threads, batches, context ---


def _first_draft(given: Given, notes: Notes) -> Draft:
    """Threads, batches, context, and what the user fixed; no layer is on a device yet."""
    limits = given.limits
    threads, threads_batch = choose_threads(given, notes)
    n_batch, n_ubatch = _batches(limits)
    notes.because("n_ubatch", n_ubatch, "set by the user" if limits.n_ubatch else "the engine's default")
    notes.because("kv type", f"{limits.type_k}/{limits.type_v}", "full precision unless -ctk/-ctv say otherwise")
    context = ContextSettings(
        n_ctx=_wanted_context(given, notes),
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        type_k=limits.type_k,
        type_v=limits.type_v,
        flash_attention=limits.flash_attention,
        threads=threads,
        threads_batch=threads_batch,
        n_outputs=max(limits.n_outputs, limits.parallel),
        n_sequences=limits.parallel,
        placement=limits.placement,
        rope=limits.rope,
    )
    return Draft(ModelSettings(0, limits.placement, limits.adapters, limits.override_kv), context)


def _batches(limits: Limits) -> tuple[int, int]:
    """n_batch and n_ubatch."""
    n_ubatch = limits.n_ubatch or min(512, limits.n_batch or 512)
    n_batch = max(2048, n_ubatch) if limits.n_batch is None else limits.n_batch
    if n_ubatch > n_batch:
        raise UsageError(f"-ub {n_ubatch} is larger than -b {n_batch}", "make -b at least as large as -ub")
    return n_batch, n_ubatch


def _wanted_context(given: Given, notes: Notes) -> int:
    """The context before memory is looked at."""
    limits = given.limits
    trained = given.shape.n_ctx_train or DEFAULT_CONTEXT
    if limits.rope.freq_scale:
        trained = round(trained / limits.rope.freq_scale)
    if limits.n_ctx is not None:
        n_ctx = round_up(limits.n_ctx, CELL_STEP)
        step = f", rounded up from {limits.n_ctx} to the engine's step of {CELL_STEP}"
        notes.because("n_ctx", n_ctx, f"set by the user{'' if n_ctx == limits.n_ctx else step}")
        if n_ctx > round_up(trained, CELL_STEP):
            notes.warnings.append(f"context {n_ctx} is above the {trained} tokens that this model was trained for")
        return n_ctx
    wanted = round_up(max(DEFAULT_CONTEXT, limits.tokens_needed), CELL_STEP)
    n_ctx = min(wanted, round_up(trained, CELL_STEP))
    why = f"the default of {DEFAULT_CONTEXT}" if wanted == DEFAULT_CONTEXT else "prompt and answer need it"
    if n_ctx < wanted:
        why = f"the {trained} tokens that this model was trained for"
    notes.because("n_ctx", n_ctx, f"{why}; -c sets another")
    return n_ctx


# --- host memory ---


def largest_context(hardware: Hardware, limits: Limits, draft: Draft, bytes_of: BytesOf) -> int:
    """The largest context, at most the draft's, whose bytes fit into host memory; 0 when not even the smallest does."""
    budget = host_budget(hardware, limits)

    def fits(steps: int) -> bool:
        return _host_bytes(bytes_of(draft.with_context(steps * CELL_STEP))) <= budget

    return largest(draft.context.n_ctx // CELL_STEP, fits) * CELL_STEP


def _host_bytes(used: tuple[MemoryUse, ...]) -> int:
    return sum(use.total for use in used if use.device == CPU)


def _fit_host(given: Given, notes: Notes, draft: Draft) -> tuple[Draft, tuple[MemoryUse, ...]]:
    """The draft with its exact bytes; with a smaller context where host memory needs it and the user left that open."""
    used = given.bytes_of(draft)
    needed, budget = _host_bytes(used), host_budget(given.hardware, given.limits)
    if needed <= budget:
        return draft, used
    room = largest_context(given.hardware, given.limits, draft, given.bytes_of)
    limit, figures = host_limit(given.hardware, given.limits)
    if room and given.limits.n_ctx is None:
        notes.instead("n_ctx", room, f"capped by {limit} ({format_size(budget)})")
        notes.warnings.append(f"context capped to {room} tokens by {limit}")
        capped = draft.with_context(room)
        return capped, given.bytes_of(capped)
    wanted = f"a context of {draft.context.n_ctx} tokens needs {format_size(needed)} of memory"
    what = f"{wanted}, and {figures}"
    if room:
        raise DoesNotFit(what, f"{room} tokens would fit: -c {room}", {"n_ctx": room})
    raise DoesNotFit(what, "not even the smallest context fits: use a smaller model or quantization")


# --- reasons ---
