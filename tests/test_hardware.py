"""hardware.py: JSON there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridgen_gguf.errors import BadFile
from hybridgen_gguf.machine.hardware import (
    Cache,
    Cpu,
    Device,
    Disk,
    Hardware,
    KernelRate,
    Link,
    Memory,
    NumaNode,
    Pcie,
    ThreadRate,
    from_json,
    to_json,
)

SMALL = Hardware(Cpu("a CPU", "x86_64", 2, 2, 2, "2 physical cores"), Memory(8 << 30, 4 << 30))
FULL = Hardware(
    Cpu(
        "漢 CPU", "aarch64", 16, 12, 8, "8 performance cores", 8, 4, 2, 1,
        (NumaNode(0, (0, 1), 1 << 30, 1 << 29), NumaNode(1, ())), (Cache(3, "unified", 32 << 20, 1, 16),), ("sve",),
        (0, 1, 2), 7.65, "powersave", (KernelRate("matvec", "q4_K", 8, 40.5, 160),),
    ),
    Memory(1 << 40, 1 << 39, "free", 1 << 39, 1, 2, 60, 65536, 2 << 20, 3, 4, "madvise",
           (ThreadRate(1, 12.5), ThreadRate(2, 20.0))),
    (
        Device("CUDA0", "gpu", "a card", "GPU-1", 8 << 30, 7 << 30, "580.1", "9.0", 0,
               Pcie("0000:01:00.0", 1, 8, 4, 16), 900.0, 5e-6),
        Device("RPC0", "rpc"),
    ),
    (Link("CUDA0", 25.0, 24.0, 11.0, 10.0, 2.3e-4),),
    Disk("/models", 1 << 40, False, 3.5),
    ("a note",),
)  # fmt: skip


@pytest.mark.parametrize("hardware", [SMALL, FULL])
def test_json_there_and_back(hardware: Hardware) -> None:
    text = json.dumps(to_json(hardware), ensure_ascii=False, allow_nan=False)
    assert from_json(json.loads(text)) == hardware


def test_whole_numbers_are_rates_too() -> None:
    value = to_json(FULL)
    value["cpu"]["quota"] = 4
    quota = from_json(value).cpu.quota
    assert quota == 4.0
    assert isinstance(quota, float)


def test_fields_that_are_missing_take_their_defaults() -> None:
    value = to_json(SMALL)
    del value["links"], value["cpu"]["caches"], value["memory"]["swappiness"]
    assert from_json(value) == SMALL


def change(path: str, new: Any) -> Any:
    value = to_json(FULL)
    at: Any = value
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[last] = new
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "hardware is not an object"),
        ([], "hardware is not an object"),
        ({}, "without its field cpu"),
        (change("cpu.logical", "2"), "hardware.cpu.logical is not of type int"),
        (change("cpu.logical", True), "not of type int"),
        (change("cpu.logical", None), "not of type int"),
        (change("cpu.quota", float("nan")), "hardware.cpu.quota is not a finite number"),
        (change("cpu.quota", 10**400), "not a finite number"),
        (change("cpu.quota", "7"), "not of type float"),
        (change("cpu.affinity", {}), "hardware.cpu.affinity is not a list"),
        (change("cpu.affinity", [1, "2"]), r"hardware.cpu.affinity\[1\] is not of type int"),
        (change("devices.0.kind", "tpu"), r"devices\[0\].kind is not one of cpu, gpu, rpc"),
        (change("devices.0.pcie", 3), "pcie is not an object"),
        (change("memory.colour", 1), "unknown field 'colour'"),
        (change("memory", {"total": 1}), "hardware.memory is without its field available"),
    ],
)
def test_damaged_descriptions(value: object, says: str) -> None:
    with pytest.raises(BadFile, match=says) as caught:
        from_json(value)
    assert "profile" in caught.value.hint
