"""A KV cache in two memories: asks the engine for one, and reads its counters (include/hg-tiers.h).

Knows neither plans nor policies' merits.
Invariant: tiers asked for are taken by the next context made on this thread, or forgotten; `pending` sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError, UsageError
from ..settings import KV_POLICIES, KV_TYPES
from .abi.hg import KvCounters, KvTiers
from .library import Library


@dataclass(frozen=True)
class Tiers:
    """What a context's cells do. `cells_device` of every stream lie on the device, the rest of n_ctx in host memory.

    type_k, type_v: types of host cells; None: as on the device. cpu_tokens: the largest micro-batch for which the CPU
    attends to host cells; larger ones have them copied to the device; None: the engine's default; 0: never the CPU.
    share: part of the host cells (0 to 1) that is copied to the device while the CPU attends to the others.
    """

    cells_device: int
    type_k: str | None = None
    type_v: str | None = None
    policy: str = "fill"
    sinks: int = 4
    block: int = 256
    cpu_tokens: int | None = None
    share: float = 0.0
    pinned: bool = True


@dataclass(frozen=True)
class TierCounters:
    """What the tiers of one context have done since it was made. Bytes are K and V together; times are seconds."""

    steps: int
    steps_tiered: int
    steps_streamed: int
    tokens: int
    bytes_device: int
    bytes_host: int
    bytes_streamed: int
    bytes_moved: int
    cpu_s: float
    wait_s: float
    head_starts: int
    cells_device: int
    cells_host: int
    size_device: int
    size_host: int
    size_host_bytes: int
    pinned: bool
    huge_pages: bool
    stores_sent: int


@dataclass
class Asked:
    """Tiers asked for; `note` says afterwards why they were refused, or what they have to do without."""

    note: str = ""


@contextlib.contextmanager
def pending(library: Library, tiers: Tiers | None) -> Iterator[Asked]:
    """Inside, the next context gets these tiers. Raises EngineError without our patches, UsageError for wrong names."""
    asked = Asked()
    if tiers is None:
        yield asked
        return
    if not library.has_tiers:
        raise EngineError("this engine cannot keep KV in two memories", "build it with scripts/setup")
    request = KvTiers(
        cells_device=tiers.cells_device,
        type_k_host=_type(tiers.type_k),
        type_v_host=_type(tiers.type_v),
        policy=_policy(tiers.policy),
        sinks=tiers.sinks,
        block=tiers.block,
        cpu_tokens=-1 if tiers.cpu_tokens is None else tiers.cpu_tokens,
        pinned=int(tiers.pinned),
        share=round(tiers.share * 1000),
    )
    library.llama.hg_set_kv_tiers(ctypes.byref(request))
    try:
        yield asked
    finally:
        asked.note = bytes(library.llama.hg_kv_tiers_message()).decode()
        library.llama.hg_set_kv_tiers(None)


def counters(library: Library, context: Any) -> TierCounters | None:
    """The counters of a context (its handle); None when it has no tiers."""
    raw = KvCounters()
    if not library.has_tiers or not library.llama.hg_get_kv_counters(context, ctypes.byref(raw)):
        return None
    values = {name: getattr(raw, name) for name, *_ in raw._fields_}
    values["cpu_s"], values["wait_s"] = values.pop("ns_cpu") * 1e-9, values.pop("ns_wait") * 1e-9
    values["pinned"], values["huge_pages"] = bool(raw.pinned), bool(raw.huge_pages)
    return TierCounters(**values)


def set_cpu_tokens(library: Library, context: Any, cpu_tokens: int) -> bool:
    """Moves the border between CPU and device for host cells. False when the context has no tiers."""
    return library.has_tiers and bool(library.llama.hg_kv_set_cpu_tokens(context, cpu_tokens))


def _type(name: str | None) -> int:
    if name is None:
        return -1
    if name not in KV_TYPES:
        raise UsageError(f"host cells cannot have type '{name}'", f"one of: {', '.join(KV_TYPES)}")
    return KV_TYPES[name]


def _policy(name: str) -> int:
    if name not in KV_POLICIES:
        raise UsageError(f"there is no KV policy '{name}'", f"one of: {', '.join(KV_POLICIES)}")
    return KV_POLICIES[name]
