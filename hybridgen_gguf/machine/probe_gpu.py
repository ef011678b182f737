"""Lists NVIDIA GPUs through the driver's own library (NVML), as CUDA in this process would number them.

Knows nothing of the engine. Invariant: without a driver nothing is imported, and no failure of the driver goes further
than a note. AMD, Intel and Apple devices are known to the engine alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .hardware import Device, Pcie
from .probe_cgroup import read_text

_DRIVER_SIGNS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")  # the last is Windows' WSL
T = TypeVar("T")


def has_driver(root: Path) -> bool:
    """Whether it is worth while to load NVML; looking for the library itself costs 20 ms."""
    if sys.platform == "win32":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32/nvml.dll").exists()
    return any((root / sign).exists() for sign in _DRIVER_SIGNS)


def read_gpus(root: Path, environ: Mapping[str, str], nvml: Any = None) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Devices that CUDA_VISIBLE_DEVICES leaves, named CUDA0, CUDA1, ... in CUDA's order, and notes on what failed.

    `nvml` stands in for the module `pynvml` in tests.
    """
    if nvml is None and not has_driver(root):
        return (), ()
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return (), ("an NVIDIA driver is installed, but the Python package nvidia-ml-py is not",)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), (f"the NVIDIA driver does not answer: {error}",)
    try:
        driver = _try(nvml, nvml.nvmlSystemGetDriverVersion)
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        chosen = _visible(nvml, _cuda_order(nvml, handles, environ), environ.get("CUDA_VISIBLE_DEVICES"))
        return tuple(_device(nvml, root, f"CUDA{i}", handle, driver) for i, handle in enumerate(chosen)), ()
    except nvml.NVMLError as error:
        return (), (f"the NVIDIA driver does not answer: {error}",)
    finally:
        _try(nvml, nvml.nvmlShutdown)


def _cuda_order(nvml: Any, handles: list[Any], environ: Mapping[str, str]) -> list[Any]:
    """NVML counts by bus address; CUDA puts the fastest first unless told otherwise."""
    if len(handles) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return handles
    speeds = [_speed(nvml, handle) for handle in handles]
    first = speeds.index(max(speeds))
    return [handles[first], *handles[:first], *handles[first + 1 :]]


def _speed(nvml: Any, handle: Any) -> float:
    cores = _try(nvml, lambda: nvml.nvmlDeviceGetNumGpuCores(handle)) or 0
    clock = _try(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)) or 0
    return float(cores) * float(clock)


def _visible(nvml: Any, handles: list[Any], variable: str | None) -> list[Any]:
    """CUDA's own rule: entries are numbers or (beginnings of) UUIDs; the first that is wrong ends the list; one named
    twice makes CUDA see nothing."""
    if variable is None:
        return handles
    chosen: list[Any] = []
    uuids: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        handle = _find(nvml, handles, entry)
        if handle is None:
            break
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
        if uuid in uuids:
            return []
        chosen.append(handle)
        uuids.append(uuid)
    return chosen


def _find(nvml: Any, handles: list[Any], entry: str) -> Any:
    if entry.isascii() and entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        return _try(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(entry))
    if entry.startswith("GPU-"):
        matching = [handle for handle in handles if str(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    return None


def _device(nvml: Any, root: Path, name: str, handle: Any, driver: str | None) -> Device:
    memory = _try(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = _try(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    pcie = _pcie(nvml, handle)
    node = None if pcie is None else read_text(root / "sys/bus/pci/devices" / pcie.address / "numa_node")
    return Device(
        name=name,
        kind="gpu",
        description=str(_try(nvml, lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        uuid=_try(nvml, lambda: str(nvml.nvmlDeviceGetUUID(handle))),
        memory_total=0 if memory is None else int(memory.total),
        memory_free=0 if memory is None else int(memory.free),
        driver=driver,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        numa_node=int(node) if node is not None and node.isdecimal() else None,
        pcie=pcie,
    )


def _pcie(nvml: Any, handle: Any) -> Pcie | None:
    info = _try(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle))
    if info is None:
        return None
    address = info.busId.decode("ascii", "replace") if isinstance(info.busId, bytes) else str(info.busId)
    domain, _, rest = address.lower().partition(":")  # NVML writes eight digits of domain, Linux four
    return Pcie(
        address=f"{domain[-4:]}:{rest}",
        generation=_try(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        width=_try(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        generation_max=_try(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        width_max=_try(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
    )


def _try(nvml: Any, ask: Callable[[], T]) -> T | None:
    """What a card can't tell is None: older cards and virtual ones lack many answers."""
    try:
        return ask()
    except nvml.NVMLError:
        return None
