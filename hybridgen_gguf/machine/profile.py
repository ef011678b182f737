"""What was measured of this machine, remembered: Hardware → Hardware with rates.

One JSON file in the user's cache folder. Measures nothing itself (`profiling` does); knows no model and no plan.
Invariant: what is remembered is used only on the machine and engine it was measured on, and not if it was busy.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..errors import HgError, NoSpace
from ..folders import cache_folder
from .hardware import Hardware, from_json, to_json

MOST_AGE = timedelta(days=30)
MOST_BUSY = 0.5
NOT_MEASURED = "this machine was not measured yet: run `hgguf profile`"
_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """What was measured, when and where. `seconds`: how long it took; `busy`: share of the CPUs that others used."""

    fingerprint: str
    measured: str
    seconds: float
    busy: float
    hardware: Hardware

    @property
    def age(self) -> timedelta:
        return datetime.now(UTC) - datetime.fromisoformat(self.measured)


def fingerprint_of(hardware: Hardware) -> str:
    """Names the machine and the engine: CPU, usable cores, devices, and the engine's files by size and time."""
    from ..engine.library import find

    folder = find()
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.glob("*ggml*"))
    cpu = hardware.cpu
    devices = [(device.name, device.uuid or device.description, device.memory_total) for device in hardware.devices]
    parts = (_VERSION, cpu.model, cpu.logical, cpu.usable_threads, hardware.memory.total, devices, str(folder), files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def profile_path() -> Path:
    """Where the profile is kept; HGGUF_PROFILE names another file."""
    return Path(os.environ.get("HGGUF_PROFILE") or cache_folder() / "profile.json")


def save(profile: Profile, path: Path | None = None) -> Path:
    """Writes the profile for later runs."""
    path = path or profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {**asdict(profile), "hardware": to_json(profile.hardware)}
    write_whole(path, json.dumps(data, indent=1).encode())
    return path


def check_can_write(path: Path, variable: str) -> None:
    """Raises NoSpace when `path` cannot be written: better before a minute of measuring than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}, so nothing could be remembered"
        raise NoSpace(what, f"set {variable} to a place of yours") from None


def write_whole(path: Path, data: bytes) -> None:
    """A file that is either the old one or the new one, whatever happens meanwhile."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path | None = None) -> Profile | None:
    """The remembered profile, whatever machine it is of. None when there is none or it cannot be read."""
    try:
        data = json.loads((path or profile_path()).read_bytes())
        return Profile(
            str(data["fingerprint"]), str(data["measured"]), float(data["seconds"]), float(data["busy"]),
            from_json(data["hardware"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, HgError):
        return None


def with_profile(hardware: Hardware, profile: Profile | None) -> tuple[Hardware, str]:
    """The hardware with the rates of a profile, and a sentence when none could be used (empty: used)."""
    if profile is None:
        return hardware, NOT_MEASURED
    if profile.fingerprint != fingerprint_of(hardware):
        return hardware, "the profile is of another machine, engine or set of devices: run `hgguf profile` again"
    if profile.busy > MOST_BUSY:  # rates of several threads are then far too low, and a plan by them is worse than none
        return hardware, "the profile was measured on a busy machine: run `hgguf profile` again"
    old = f"the profile is {profile.age.days} days old: run `hgguf profile` again" if profile.age > MOST_AGE else ""
    return merged(hardware, profile.hardware), old


def merged(hardware: Hardware, measured: Hardware) -> Hardware:
    """What the machine has now, with the rates that were measured."""
    known = {device.name: device for device in measured.devices}
    devices = tuple(
        replace(d, read_gbps=known[d.name].read_gbps, launch_s=known[d.name].launch_s, kernels=known[d.name].kernels)
        if d.name in known else d
        for d in hardware.devices
    )  # fmt: skip
    disk = hardware.disk
    if disk is not None and measured.disk is not None and disk.path == measured.disk.path:
        disk = replace(disk, read_gbps=measured.disk.read_gbps)
    return replace(
        hardware,
        cpu=replace(hardware.cpu, kernels=measured.cpu.kernels),
        memory=replace(hardware.memory, read=measured.memory.read),
        devices=devices,
        links=measured.links,
        disk=disk or measured.disk,
    )


def as_json(profile: Profile, path: Path | None = None) -> dict[str, Any]:
    """The keys that `hgguf profile --json` promises."""
    hardware = to_json(profile.hardware)
    memory = dict(hardware["memory"])
    memory["read_gbps"] = {str(rate["threads"]): rate["gbps"] for rate in memory.pop("read")}
    return {
        "cpu": hardware["cpu"],
        "memory": memory,
        "devices": hardware["devices"],
        "links": hardware["links"],
        "disk": hardware["disk"],
        "notes": hardware["notes"],
        "measured": profile.measured,
        "age_days": profile.age.days,
        "seconds": profile.seconds,
        "busy": profile.busy,
        "fingerprint": profile.fingerprint,
        "file": None if path is None else str(path),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
    }


def with_known_rates(hardware: Hardware) -> tuple[Hardware, str]:
    """`with_profile` with the remembered profile: what a planner wants. Costs a few milliseconds."""
    return with_profile(hardware, load())
