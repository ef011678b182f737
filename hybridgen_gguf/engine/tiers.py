"""A KV cache in two memories: asks the engine for one, and reads its counters (include/hg-tiers.h).

Knows neither plans nor policies' merits.
Invariant: tiers asked for are taken by the next context made on this thread, or forgotten; `pending` sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError, UsageError
from ..settings import KV_POLICIES, KV_TYPES
from . import abi
from .library import Library


class _Tiers(Structure):
    """struct hg_kv_tiers (include/hg-tiers.h)."""

    _fields_ = (
        ("cells_device", c_uint32),
        ("type_k_host", c_int32),
        ("type_v_host", c_int32),
        ("policy", c_int32),
        ("sinks", c_uint32),
        ("block", c_uint32),
        ("cpu_tokens", c_int32),
        ("pinned", c_int32),
        ("share", c_uint32),
    )


class _Counters(Structure):
    """struct hg_kv_counters (include/hg-tiers.h)."""

    _fields_ = (
        ("steps", c_uint64),
        ("steps_tiered", c_uint64),
        ("steps_streamed", c_uint64),
        ("tokens", c_uint64),
        ("bytes_device", c_uint64),
        ("bytes_host", c_uint64),
        ("bytes_streamed", c_uint64),
        ("bytes_moved", c_uint64),
        ("ns_cpu", c_uint64),
        ("ns_wait", c_uint64),
        ("head_starts", c_uint64),
        ("cells_device", c_uint32),
        ("cells_host", c_uint32),
        ("size_device", c_uint32),
        ("size_host", c_uint32),
        ("size_host_bytes", c_uint64),
        ("pinned", c_uint32),
        ("huge_pages", c_uint32),
        ("stores_sent", c_uint64),
    )


# fmt: off
_HG_TIERS: dict[str, tuple[object, tuple[object, ...]]] = {
    # void hg_set_kv_tiers(const struct hg_kv_tiers * tiers);
    "hg_set_kv_tiers": (None, (POINTER(_Tiers),)),
    # const char * hg_kv_tiers_message(void);
    "hg_kv_tiers_message": (c_char_p, ()),
    # bool hg_get_kv_counters(const struct llama_context * ctx, struct hg_kv_counters * out);
    "hg_get_kv_counters": (c_bool, (c_void_p, POINTER(_Counters))),
    # bool hg_kv_set_share(struct llama_context * ctx, uint32_t share);
    "hg_kv_set_share": (c_bool, (c_void_p, c_uint32)),
    # bool hg_kv_set_cpu_tokens(struct llama_context * ctx, int32_t cpu_tokens);
    "hg_kv_set_cpu_tokens": (c_bool, (c_void_p, c_int32)),
}
# fmt: on


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


def has_tiers(library: Library) -> bool:
    """Whether this engine knows KV tiers."""
    return abi.declare(library.llama, _HG_TIERS)


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
    if not has_tiers(library):
        raise EngineError("this engine cannot keep KV in two memories", "build it with scripts/setup")
    request = _Tiers(
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
    raw = _Counters()
    if not has_tiers(library) or not library.llama.hg_get_kv_counters(context, ctypes.byref(raw)):
        return None
    values = {name: getattr(raw, name) for name, *_ in raw._fields_}
    values["cpu_s"], values["wait_s"] = values.pop("ns_cpu") * 1e-9, values.pop("ns_wait") * 1e-9
    values["pinned"], values["huge_pages"] = bool(raw.pinned), bool(raw.huge_pages)
    return TierCounters(**values)


def set_cpu_tokens(library: Library, context: Any, cpu_tokens: int) -> bool:
    """Moves the border between CPU and device for host cells. False when the context has no tiers."""
    return has_tiers(library) and bool(library.llama.hg_kv_set_cpu_tokens(context, cpu_tokens))


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
