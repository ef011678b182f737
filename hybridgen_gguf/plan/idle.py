"""Settings of the user that change nothing for this model on this machine, in words. Pure.

Knows no plan. Invariant: each is named once, with the flag and what was given.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import UsageError
from ..settings import Placement
from .buffers import EXPERTS, idle_patterns
from .inputs import Given, Notes


def note_idle(given: Given, notes: Notes) -> None:
    """Warns of settings without an effect. Raises UsageError for the first where the limits are strict."""
    found = list(_idle(given))
    if found and given.limits.strict:
        raise UsageError(found[0], "leave it out, or leave out --strict")
    notes.warnings += found


def _idle(given: Given) -> Iterator[str]:
    fixed, plain = given.limits.placement, Placement()
    for pattern in idle_patterns([tensor.name for tensor in given.shape.file.tensors], fixed.overrides):
        flag = f"-ncmoe (pattern {pattern})" if pattern.endswith(EXPERTS) else f"-ot {pattern}"
        yield f"{flag} has no effect: it matches no tensor of this model"
    yield from _idle_rope(given)
    if given.may_use_devices:
        return
    if fixed.tensor_split:
        yield f"-ts {','.join(f'{share:g}' for share in fixed.tensor_split)} has no effect: no device is used"
    if fixed.main_gpu != plain.main_gpu:
        yield f"-mg {fixed.main_gpu} has no effect: no device is used"
    if fixed.split_mode != plain.split_mode:
        yield f"-sm {fixed.split_mode} has no effect: no device is used"


def _idle_rope(given: Given) -> Iterator[str]:
    rope, known = given.limits.rope, given.shape.file.metadata
    scaling = rope.scaling or str(known.get(f"{given.shape.architecture}.rope.scaling.type", "linear"))
    if scaling == "none" and rope.freq_scale is not None:
        yield f"--rope-freq-scale {rope.freq_scale:g} has no effect: positions are not scaled (--rope-scaling none)"
    if rope.ext_factor or (scaling == "yarn" and rope.ext_factor is None):
        if rope.attn_factor is not None:  # llama_context's constructor sets it anew
            yield f"--yarn-attn-factor {rope.attn_factor:g} has no effect with YaRN, which has one of its own"
        return
    for name in ("orig_ctx", "beta_slow", "beta_fast"):
        if (value := getattr(rope, name)) is not None:
            yield f"--yarn-{name.replace('_', '-')} {value:g} has no effect without --rope-scaling yarn"
