"""What `doctor` looks at beside Hardware: the engine, the driver, how the clock is chosen, how far memory nodes are.

Judges nothing. Invariant: it always gives an answer; what cannot be read keeps its default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .probe_cgroup import read_text

if TYPE_CHECKING:
    from ..engine.library import Library


@dataclass(frozen=True)
class Clock:
    """Of the first CPU: the kernel's driver, its energy preference, the least frequency that it may choose and the most
    that the CPU can do, in Hz (0: unknown)."""

    driver: str = ""
    preference: str = ""
    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class Facts:
    """What Hardware does not hold. `gpu_backends`: of the engine; `patched`: it is ours; `problem`: why there is none.

    `nvidia_seen`: the kernel knows an NVIDIA card; `driver_answers`: its driver does; `wait_policy`: OMP_WAIT_POLICY;
    `clock`: how the CPU's frequency is chosen; `numa_distance`: of the farthest node, as the firmware tells (10: near).
    """

    engine: bool = True
    patched: bool = True
    gpu_backends: tuple[str, ...] = ()
    problem: str = ""
    nvidia_seen: bool = False
    driver_answers: bool = True
    notes: tuple[str, ...] = ()
    wait_policy: str = ""
    clock: Clock = Clock()
    numa_distance: int = 0


def read_facts(library: Library | None, problem: str = "", root: Path = Path("/")) -> Facts:
    """Asks the engine and the system."""
    from .probe import read_hardware

    system = read_hardware(root=root)
    backends = (
        () if library is None else tuple(name for name in library.backends() if name not in ("CPU", "RPC", "BLAS"))
    )
    return Facts(
        engine=library is not None,
        patched=library is not None and library.patched,
        gpu_backends=backends,
        problem=problem,
        nvidia_seen=(root / "dev/nvidiactl").exists() or bool(system.devices) or _pci_nvidia(root),
        driver_answers=not any("driver does not answer" in note for note in system.notes),
        notes=system.notes,
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        clock=_clock(root),
        numa_distance=_numa_distance(root),
    )


def _clock(root: Path) -> Clock:
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    names = ("scaling_driver", "energy_performance_preference", "scaling_min_freq", "cpuinfo_max_freq")
    driver, preference, least, most = (read_text(folder / name) or "" for name in names)
    least_khz, most_khz = (int(text) if text.isdecimal() else 0 for text in (least, most))
    return Clock(driver, preference, least_khz * 1000, most_khz * 1000)


def _numa_distance(root: Path) -> int:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    words = [word for folder in folders for word in (read_text(folder / "distance") or "").split()]
    return max((int(word) for word in words if word.isdecimal()), default=0)


def _pci_nvidia(root: Path) -> bool:
    """A display controller of NVIDIA on the bus, with or without its driver."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False
