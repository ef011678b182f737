"""What a machine has: `Hardware` and its parts, and JSON of them. Knows no files, no driver and no model; `probe` fills
in what can be read, a profile adds what must be measured.

Units: sizes in bytes, rates in GB/s (1e9 bytes) or GFLOP/s, times in seconds. A measured field is None, or empty, until
somebody has measured it. Invariant: `from_json(to_json(hardware)) == hardware`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BadFile

DeviceKind = Literal["cpu", "gpu", "rpc"]
_MOST_LEVELS = 8  # of nesting in JSON; Hardware has four


@dataclass(frozen=True)
class Cache:
    """One level. `kind`: data, instruction or unified; `size` of one of `instances`, each for `shared_by` CPUs."""

    level: int
    kind: str
    size: int
    instances: int
    shared_by: int


@dataclass(frozen=True)
class NumaNode:
    """A memory node; one without `cpus` is memory alone (CXL, for instance)."""

    number: int
    cpus: tuple[int, ...]
    memory_total: int = 0
    memory_free: int = 0


@dataclass(frozen=True)
class KernelRate:
    """Measured: `operation` (matvec, matmul, attention) on weights or cells of `type` with `threads` threads."""

    operation: str
    type: str
    threads: int
    gbps: float
    gflops: float


@dataclass(frozen=True)
class ThreadRate:
    """Measured: bytes read per second by `threads` threads together."""

    threads: int
    gbps: float


@dataclass(frozen=True)
class Cpu:
    """Cores, and how many threads to use.

    `logical` CPUs are online; `physical` cores, of which `performance_cores` and `efficiency_cores` (0 where all are
    equal); `smt` logical CPUs on the largest core. `affinity`: the logical CPUs this process may run on. `quota`: CPUs
    that the control group allows, None for no limit. `usable_threads` >= 1, with `threads_reason`, a short sentence.
    """

    model: str
    architecture: str
    logical: int
    physical: int
    usable_threads: int
    threads_reason: str
    performance_cores: int = 0
    efficiency_cores: int = 0
    smt: int = 1
    sockets: int = 1
    numa: tuple[NumaNode, ...] = ()
    caches: tuple[Cache, ...] = ()
    features: tuple[str, ...] = ()
    affinity: tuple[int, ...] = ()
    quota: float | None = None
    governor: str | None = None
    kernels: tuple[KernelRate, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Main memory.

    `available`: what this process can still take without swapping, all limits counted; `available_reason` says which
    limit decides, and `reserve` bytes of it are for what is not planned. `limit`: the least of the control groups' and
    the process's limits, None for none. `memlock`: what may be locked, None for any amount.
    `transparent_huge_pages`: always, madvise or never.
    """

    total: int
    available: int
    available_reason: str = ""
    limit: int | None = None
    swap_total: int = 0
    swap_free: int = 0
    swappiness: int | None = None
    memlock: int | None = None
    huge_page_size: int = 0
    huge_pages_total: int = 0
    huge_pages_free: int = 0
    transparent_huge_pages: str | None = None
    read: tuple[ThreadRate, ...] = ()
    reserve: int = 256 << 20


@dataclass(frozen=True)
class Pcie:
    """A card's slot: `address` such as 0000:01:00.0; generation and lanes now, and the most that card and slot can do.

    An idle card lowers its generation to save power, so compare under load.
    """

    address: str
    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    width_max: int | None = None


@dataclass(frozen=True)
class Device:
    """Something that computes beside the CPU. `name` as the engine calls it: CUDA0, RPC0.

    `buffer_type`: the engine's name of its memory, as -ot takes it, where it is another: RPC0[HOST:PORT].

    `launch_s`: measured cost of one launch and wait; `kernels` and `read_gbps`: measured on the device's own memory.
    """

    name: str
    kind: DeviceKind
    description: str = ""
    uuid: str | None = None
    memory_total: int = 0
    memory_free: int = 0
    driver: str | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    pcie: Pcie | None = None
    read_gbps: float | None = None
    launch_s: float | None = None
    kernels: tuple[KernelRate, ...] = ()
    buffer_type: str = ""


@dataclass(frozen=True)
class Link:
    """The way between main memory and `device`. All measured; `pinned`: from page-locked memory. `split_s`: the fixed
    cost of handing one layer's work over to the CPU and back."""

    device: str
    to_device_pinned_gbps: float | None = None
    from_device_pinned_gbps: float | None = None
    to_device_gbps: float | None = None
    from_device_gbps: float | None = None
    split_s: float | None = None


@dataclass(frozen=True)
class Disk:
    """Where the model lies. `read_gbps` is measured, past the page cache."""

    path: str
    free: int
    rotational: bool | None = None
    read_gbps: float | None = None


@dataclass(frozen=True)
class Hardware:
    """The whole machine, as one process sees it. `notes`: what could not be read, and why."""

    cpu: Cpu
    memory: Memory
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    disk: Disk | None = None
    notes: tuple[str, ...] = ()


def to_json(hardware: Hardware) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers, keys as the fields are called."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(hardware))
    return plain


def from_json(value: object) -> Hardware:
    """The Hardware that `to_json` wrote. Fields that are missing take their defaults.

    Raises BadFile where a field is unknown, missing without a default, of another type, or not a finite number.
    """
    return typing.cast(Hardware, _read(Hardware, value, "hardware", 0))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, value: object, where: str, level: int) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if level > _MOST_LEVELS:
        raise _bad(where, "nested too deeply")
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where, level)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(arguments[0], value, where, level)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _bad(where, "not a list")
        return tuple(_read(arguments[0], item, f"{where}[{i}]", level + 1) for i, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise _bad(where, f"not one of {', '.join(arguments)}")
        return value
    return _read_scalar(kind, value, where)


def _read_scalar(kind: type, value: object, where: str) -> object:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) > 1e300 or not math.isfinite(value):
            raise _bad(where, "not a finite number")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _bad(where, f"not of type {kind.__name__}")
    return value


def _read_record(kind: Any, value: object, where: str, level: int) -> Any:
    if not isinstance(value, dict):
        raise _bad(where, "not an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(str(key) for key in value.keys() - hints.keys())
    if unknown:
        raise _bad(where, f"with an unknown field {unknown[0]!r:.40}")
    given = {key: _read(hints[key], item, f"{where}.{key}", level + 1) for key, item in value.items()}
    for field in dataclasses.fields(kind):
        if field.name not in given and field.default is dataclasses.MISSING:
            raise _bad(where, f"without its field {field.name}")
    return kind(**given)


def _bad(where: str, what: str) -> BadFile:
    return BadFile(f"a description of a machine is damaged: {where} is {what}", "delete it and run `hgguf profile`")
