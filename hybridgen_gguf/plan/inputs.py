"""What every step of planning reads, and the questions that several of them ask. Pure.

Knows no search and no engine. Invariant: a budget is never above what is free, nor above what the user allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..machine.hardware import Hardware
from ..machine.rates import Rates
from ..model_file.shape import ModelShape
from ..units import format_size
from .cost import ModelWork
from .types import Draft, Limits, MemoryUse, Reason

DEVICE_MARGIN = 256 << 20

BytesOf = Callable[[Draft], tuple[MemoryUse, ...]]


@dataclass
class Notes:
    """Reasons and warnings while a plan is being made."""

    reasons: list[Reason] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def because(self, name: str, value: object, why: str) -> None:
        self.reasons.append(Reason(name, str(value), why))

    def instead(self, name: str, value: object, why: str) -> None:
        """A reason that takes the place of an earlier one."""
        self.reasons[:] = [reason for reason in self.reasons if reason.name != name]
        self.because(name, value, why)


@dataclass(frozen=True)
class Given:
    """What every step of planning reads; what they say goes to `Notes`."""

    hardware: Hardware
    shape: ModelShape
    limits: Limits
    bytes_of: BytesOf
    rates: Rates
    work: ModelWork

    @property
    def may_use_devices(self) -> bool:
        """Whether there is a device that the user allows memory of."""
        return bool(self.hardware.devices) and self.limits.placement.devices != () and self.limits.vram != 0


def host_budget(hardware: Hardware, limits: Limits) -> int:
    """Bytes of host memory that a plan may take: free memory less a reserve, or --ram when that is less."""
    free = max(hardware.memory.available - hardware.memory.reserve, 0)
    return min(free, limits.ram) if limits.ram is not None else free


def host_limit(hardware: Hardware, limits: Limits) -> tuple[str, str]:
    """What sets `host_budget`: its name, and the same with its figures."""
    memory, budget = hardware.memory, host_budget(hardware, limits)
    if limits.ram is not None and budget == limits.ram:
        return "--ram", f"--ram is {format_size(budget)}"
    name = memory.available_reason or "free memory"
    left = f"{name} leaves {format_size(memory.available)}"
    return name, f"{left}, of which {format_size(memory.reserve)} are kept for what is not planned"


def device_budgets(hardware: Hardware, limits: Limits) -> dict[str, int]:
    """Bytes of buffers on each device: its free memory less a margin, or --vram when that is less.

    The margin is for what the driver and its libraries take beside the engine's buffers: 71 to 180 MiB on an H200.
    """
    known = {device.name: device for device in hardware.devices if device.kind != "cpu"}
    wanted = limits.placement.devices
    names = known if wanted is None else [name for name in wanted if name in known]
    free = {name: max(known[name].memory_free - DEVICE_MARGIN, 0) for name in names}
    return {name: min(size, limits.vram) if limits.vram is not None else size for name, size in free.items()}


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..upper with fits(n), for a monotone `fits`; 0 when there is none. Asks log2(upper) times."""
    if upper < 1 or fits(upper):
        return max(upper, 0)
    low, high = 0, upper
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def depth_of(limits: Limits, n_ctx: int) -> int:
    """Tokens expected in the context: the user's, or what prompt and answer need, or half of the context."""
    if limits.depth is not None:
        return min(limits.depth, n_ctx)
    return min(limits.tokens_needed or n_ctx // 2, n_ctx)
