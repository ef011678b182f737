"""What `tune` found, remembered for each machine, model and engine, and put to use: Limits → Limits.

One JSON file in the user's data folder. Knows no measuring and no search.
Invariant: what the user fixed is never changed, and an entry counts only for the machine, model and engine it was
measured with.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .folders import data_folder
from .machine.hardware import Hardware
from .machine.profile import fingerprint_of, write_whole
from .model_file.shape import ModelShape
from .plan import Draft, Limits
from .settings import Placement, placement_of

_LOCK_SECONDS = 10.0
_HEADER_BYTES = 1 << 20
_MOST_ENTRIES = 500


@dataclass(frozen=True)
class Place:
    """Where weights and KV lie, for a context of `n_ctx` tokens."""

    n_gpu_layers: int
    placement: Placement
    n_ctx: int

    @classmethod
    def of(cls, draft: Draft) -> Place:
        return cls(draft.model.n_gpu_layers, draft.placement, draft.context.n_ctx)

    def __str__(self) -> str:
        place = self.placement
        words = [f"{self.n_gpu_layers} layers on the device"] if self.n_gpu_layers else ["all on the CPU"]
        words += [f"{pattern} on the CPU" for pattern, _ in place.patterns]
        words += [] if place.kv_offload or not self.n_gpu_layers else ["KV on the CPU"]
        words += [] if place.tiers is None else [f"{place.tiers.cells} cells on the device"]
        return ", ".join(words)


@dataclass(frozen=True)
class Setting:
    """What tuning may change. `place`: None where there is no device, or the user fixed it."""

    threads: int
    threads_batch: int
    n_batch: int
    n_ubatch: int
    flash_attention: str
    type_k: str
    type_v: str
    place: Place | None = None


@dataclass(frozen=True)
class Tuned:
    """A setting, the speeds measured with it, for which goal and depth, and when (ISO 8601)."""

    setting: Setting
    decode_tps: float
    prompt_tps: float
    goal: str
    depth: int
    when: str


def tuned_path() -> Path:
    """Where tuned settings are kept."""
    return data_folder() / "tuned.json"


def key_of(hardware: Hardware, shape: ModelShape, limits: Limits) -> str:
    """Names machine, engine, model and budget."""
    model = hashlib.sha256()
    for path in shape.file.paths:
        with path.open("rb") as file:
            model.update(file.read(_HEADER_BYTES))
        model.update(str(path.stat().st_size).encode())
    fixed = limits.placement
    budget = f"{limits.goal}/{limits.vram}/{limits.n_gpu_layers}/{fixed.devices}/{fixed.overrides}"
    place = hashlib.sha256(budget.encode()).hexdigest()[:8]
    return f"{fingerprint_of(hardware)}-{model.hexdigest()[:16]}-{place}"


def recall(key: str, path: Path | None = None) -> Tuned | None:
    """The entry under `key`; None when there is none, or the file cannot be read."""
    entry = _read(path or tuned_path()).get(key)
    try:
        return Tuned(_setting(entry["setting"]), *(entry[name] for name in _REST)) if entry else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _setting(stored: dict[str, Any]) -> Setting:
    """JSON has lists where a Placement has tuples."""
    place = stored.get("place")
    if place is not None:
        place = Place(int(place["n_gpu_layers"]), placement_of(place["placement"]), int(place["n_ctx"]))
    return Setting(**{**stored, "place": place})


def remember(key: str, tuned: Tuned, path: Path | None = None) -> Path:
    """Adds or replaces one entry. Raises OSError when the folder cannot be written."""
    from filelock import FileLock

    path = path or tuned_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
        entries = _read(path)
        entries.pop(key, None)
        entries[key] = asdict(tuned)
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        write_whole(path, json.dumps(kept, indent=1, ensure_ascii=False).encode())
    return path


_REST = ("decode_tps", "prompt_tps", "goal", "depth", "when")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def with_tuned(limits: Limits, hardware: Hardware, shape: ModelShape) -> tuple[Limits, Tuned | None]:
    """The limits with what was tuned where the user left a choice, the placement not yet; and what was tuned."""
    path = tuned_path()
    if not path.exists():  # the usual case must cost nothing
        return limits, None
    found = recall(key_of(hardware, shape, limits), path)
    return (limits if found is None else filled(limits, found.setting)), found


def filled(limits: Limits, setting: Setting) -> Limits:
    """`limits` with `setting` where they leave a choice; a default counts as one."""
    defaults = Limits()
    names = ("threads", "threads_batch", "n_batch", "n_ubatch")
    changes: dict[str, Any] = {n: getattr(setting, n) for n in names if getattr(limits, n) is None}
    if limits.n_batch is not None or limits.n_ubatch is not None:
        changes.pop("n_batch", None)
        changes.pop("n_ubatch", None)
    if limits.threads is not None:  # -t alone also speaks for prompts
        changes.pop("threads_batch", None)
    same = ("flash_attention", "type_k", "type_v")
    if all(getattr(limits, name) == getattr(defaults, name) for name in same):
        changes |= {name: getattr(setting, name) for name in same}
    return replace(limits, **changes)


def placed(limits: Limits, place: Place | None) -> Limits | None:
    """`limits` with a tuned placement; None where there is none, or the user fixed something of it."""
    fixed = limits.placement
    # How weights are read is asked for now, and the devices to use are part of an entry's key.
    plain = Placement(devices=fixed.devices, use_mmap=fixed.use_mmap, use_mlock=fixed.use_mlock)
    if place is None or limits.n_gpu_layers is not None or limits.kv_vram is not None or fixed != plain:
        return None
    placement = replace(place.placement, use_mmap=fixed.use_mmap, use_mlock=fixed.use_mlock)
    return replace(limits, n_gpu_layers=place.n_gpu_layers, placement=placement)
