"""Chooses a type for each tensor so that the sum of losses is least within a number of bytes. Pure.

Losses of tensors are taken to add up. Invariant: the bytes chosen never exceed the budget, and no tensor could take the
next step of its own curve within what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DoesNotFit
from ..units import format_size


@dataclass(frozen=True, slots=True)
class Choice:
    """One type a tensor could have."""

    type: str
    bytes: int
    loss: float


def allocate(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """The best choice for each tensor with at most `budget` bytes in all. Raises DoesNotFit."""
    curves = {name: _useful(options) for name, options in choices.items()}
    least = sum(curve[0].bytes for curve in curves.values())
    if least > budget:
        raise DoesNotFit(
            f"even the smallest types need {format_size(least)}; the target leaves {format_size(max(budget, 0))}",
            "give a larger target, or quantize to a smaller TYPE with an importance matrix",
            {"bytes": least},
        )
    at = dict.fromkeys(curves, 0)
    left = budget - least
    # Along the lower convex hull, the step with the most loss saved for its bytes comes first.
    steps = sorted(
        ((curve[i].loss - curve[i + 1].loss) / (curve[i + 1].bytes - curve[i].bytes), name, i)
        for name, curve in curves.items()
        for i in range(len(curve) - 1)
    )
    for _, name, index in reversed(steps):
        curve = curves[name]
        extra = curve[index + 1].bytes - curve[at[name]].bytes
        if at[name] <= index and extra <= left:
            at[name] = index + 1
            left -= extra
    return {name: curve[at[name]] for name, curve in curves.items()}


def _useful(options: Sequence[Choice]) -> list[Choice]:
    """The options on the lower convex hull of loss over bytes, smallest first."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _above(first: Choice, middle: Choice, last: Choice) -> bool:
    return (middle.loss - first.loss) * (last.bytes - first.bytes) >= (last.loss - first.loss) * (
        middle.bytes - first.bytes
    )
