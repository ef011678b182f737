"""A model's name → an open LanguageModel: resolve, fetch, plan, open. What the Python API and the verbs share.

Invariant: nothing stays open when it raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .adapt.border import Feedback
from .adapt.threads import Governor
from .batching import Batching
from .errors import UsageError
from .generate import LanguageModel
from .loader import Prepared, open_model, prepare
from .machine.rates import Rates
from .plan import Limits
from .plan.cost import work_of
from .plan.predict import predict
from .schedule import UNKNOWN, Rules
from .schedule import Rates as StepRates
from .settings import Adapter, Override, Placement


def find_model(text: str, progress: Callable[[int, int], None] | None = None) -> tuple[Path, Mapping[str, float]]:
    """The file that `text` stands for, fetched when it is an alias, and the sampling its maker suggests."""
    from .models.registry import resolve

    ref = resolve(text)
    if ref.path is not None:
        return ref.path, {}
    from .models.download import pull

    pulled = pull(ref, progress) if progress else pull(ref)
    return pulled.path, ref.entry.sampling if ref.entry else {}


def open_prepared(
    prepared: Prepared,
    progress: Callable[[float], bool] | None = None,
    *,
    adapt_threads: bool = False,
    adapt_kv: bool = False,
    rules: Rules | None = None,
) -> LanguageModel:
    """Opens a plan, with the engine's own sampler passes where it has them.

    `adapt_threads`: with a governor of threads. `adapt_kv`: where host cells are attended to follows measurement.
    `rules`: how several requests share the context (Limits.parallel).
    """
    opened = open_model(prepared, progress)
    if note := opened.context.tier_note:
        warnings.warn(f"KV in two memories: {note}", RuntimeWarning, stacklevel=2)
    asked, layer = prepared.plan.context, prepared.shape.attention_layer
    governor = Governor(opened.context, asked.threads, asked.threads_batch) if adapt_threads else None
    border = None
    if adapt_kv and layer is not None and asked.tiers is not None and opened.context.tier_counters() is not None:
        border = Feedback(opened.context, layer.queries, asked.tiers.cpu_tokens)
    native, batching = opened.model.native_sampler(), None
    if asked.n_sequences > 1 or rules is not None:
        many = replace(rules or Rules(), parallel=asked.n_sequences)
        batching = Batching(many, step_rates(prepared), native=native)
    return LanguageModel(opened, native, governor, border, batching)


def step_rates(prepared: Prepared) -> StepRates:
    """What steps of many requests are predicted to take, from the plan's model of costs at two depths."""
    plan, work = prepared.plan, work_of(prepared.shape)
    shallow, deep = plan.context.n_ubatch, max(plan.context.n_ctx // 2, 2 * plan.context.n_ubatch)
    near, far = (predict(Rates(prepared.hardware), work, plan, depth) for depth in (shallow, deep))
    if near is None or far is None:
        return UNKNOWN
    row_cell = max(1 / far.decode_tps - 1 / near.decode_tps, 0.0) / (deep - shallow)
    # A prompt's rate is of all its tokens from the first on, so its depth is half of its length.
    token_cell = 2 * max(1 / far.prompt_tps - 1 / near.prompt_tps, 0.0) / (deep - shallow)
    token = max(1 / near.prompt_tps - token_cell * shallow / 2, 1e-9)
    step = max(1 / near.decode_tps - row_cell * shallow - token, 1e-6)
    return StepRates(step, row=token, token=token, row_cell=row_cell, token_cell=token_cell)


def _adapters(given: Iterable[Adapter | str | tuple[str, float]]) -> tuple[Adapter, ...]:
    """Names of files, pairs with a scale, or adapters."""
    each = [given] if isinstance(given, str | Adapter) else given
    return tuple(
        a if isinstance(a, Adapter) else Adapter(str(a)) if isinstance(a, str | Path) else Adapter(*a) for a in each
    )


def _overrides(given: Mapping[str, Any] | Iterable[Override]) -> tuple[Override, ...]:
    """Key → value, or overrides."""
    return tuple(Override(key, value) for key, value in given.items()) if isinstance(given, Mapping) else tuple(given)


_CHANGES: dict[str, Callable[[Any], Any]] = {"adapters": _adapters, "override_kv": _overrides}


def changed(limits: Limits, changes: Mapping[str, Any]) -> Limits:
    """`limits` with fields of their own, or of their placement, replaced by name."""
    own, places = Limits.__dataclass_fields__, Placement.__dataclass_fields__
    unknown = [name for name in changes if name not in own and name not in places]
    if unknown:
        raise UsageError(f"'{unknown[0]}' is not an option of load", f"one of: {', '.join([*own, *places])}")
    fields = {
        name: _CHANGES[name](value) if name in _CHANGES else value for name, value in changes.items() if name in own
    }
    kept = replace(limits, **fields)
    placement = {name: value for name, value in changes.items() if name in places}
    return replace(kept, placement=replace(kept.placement, **placement))


def load_model(
    text: str, limits: Limits | None, rpc: Sequence[str], changes: dict[str, Any], rules: Rules | None = None
) -> LanguageModel:
    """What `hybridgen_gguf.load` does."""
    path, _ = find_model(text)
    wanted = changed(limits or Limits(), changes)
    if rules is not None:
        wanted = replace(wanted, parallel=max(wanted.parallel, rules.parallel))
    prepared = prepare(path, wanted, rpc=rpc)
    for line in prepared.plan.warnings:
        warnings.warn(line, RuntimeWarning, stacklevel=3)
    return open_prepared(prepared, rules=rules)
