"""Where the tensors of a draft lie, by the engine's own rules. Pure.

Layers are shared out among devices in proportion to `tensor_split`, or to free memory (llama-model.cpp: load_tensors);
then the first pattern that is found in a tensor's name decides (llama-model-loader.cpp: create_tensor).
Knows no bytes of weights and no speeds. Invariant: what is said of a tensor is what the engine does, except where a
device cannot compute with its format: the engine then keeps it in host memory.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from ..errors import UsageError
from ..machine.rates import CPU
from ..settings import Placement
from .types import Draft

#: tensors that are looked up and not multiplied: always in host memory, unless a pattern says otherwise
_INPUT = ("token_embd.", "token_embd_norm.", "position_embd.", "token_types.", "per_layer_token_embd.")
#: tensors of experts, as llama.cpp's -ncmoe finds them (common.h: LLM_FFN_EXPS_REGEX)
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
# std::regex knows classes of characters that Python does not.
_CLASSES = {"alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": " \\t", "digit": "0-9", "d": "0-9", "lower": "a-z",
            "punct": "!-/:-@\\[-`{-~", "space": "\\s", "s": "\\s", "upper": "A-Z", "w": "\\w",
            "xdigit": "0-9A-Fa-f"}  # fmt: skip
_CLASS = re.compile(r"\[:(\w+):\]")


def tensor_pattern(text: str, shown: str = "") -> re.Pattern[str]:
    """A pattern of `-ot` as the engine reads it: std::regex, ECMAScript. Raises UsageError, which names `shown`."""
    translated = _CLASS.sub(lambda match: _CLASSES.get(match[1], match[0]), text)
    try:
        return re.compile(translated, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"-ot {shown or text} holds no regular expression: {error}", "write \\( for a bracket"
        ) from None


def used_devices(placement: Placement, free: Mapping[str, int]) -> tuple[str, ...]:
    """The devices that layers may go to, in the engine's order. `free`: bytes free on each that the engine sees."""
    names = placement.devices
    if names is None:  # servers come before the devices of this machine (llama.cpp: llama_prepare_model_devices)
        names = tuple(sorted(free, key=lambda name: not name.startswith("RPC")))
    return names[placement.main_gpu :][:1] if placement.split_mode == "none" else names


def layer_devices(draft: Draft, n_layers: int, free: Mapping[str, int]) -> tuple[str, ...] | None:
    """The device of each layer, the output last; None where the rows of one matrix are shared out among several."""
    place = draft.placement
    names = used_devices(place, free)
    if place.split_mode in ("row", "tensor") and len(names) > 1:
        return None
    count = min(draft.model.n_gpu_layers, n_layers + 1) if names else 0
    ends = _ends(place.tensor_split, [free.get(name, 0) for name in names])
    on_devices = (names[bisect_right(ends, _single(index / count))] for index in range(count))
    return (*(CPU for _ in range(n_layers + 1 - count)), *on_devices)


def _ends(split: Sequence[float], free: Sequence[int]) -> list[float]:
    """Where each device's share of the layers ends, 0 to 1, in the engine's single precision."""
    shares = [*split[: len(free)], *[0.0] * (len(free) - len(split))]
    sums = list(accumulate(map(_single, shares if any(shares) else free), lambda a, b: _single(a + b)))
    return [_single(end / sums[-1]) if sums[-1] else 1.0 for end in sums]


def _single(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def placer(placement: Placement, layers: Sequence[str], buffers: Mapping[str, str]) -> Callable[[str], str]:
    """A function from a tensor's name to the device that it lies on. `layers`: the device of each, the output last;
    `buffers`: buffer type → device; of any other type is host memory.

    An embedding means the output matrix, as which it may serve too.
    """
    rules = [(tensor_pattern(pattern), buffers.get(kind, CPU)) for pattern, kind in placement.patterns]

    def place(name: str) -> str:
        return next((to for pattern, to in rules if pattern.search(name)), layers[_layer_of(name, len(layers))])

    return place


def lying(
    names: Sequence[str], placement: Placement, layers: Sequence[str], buffers: Mapping[str, str]
) -> frozenset[tuple[str, str]]:
    """All of a model's tensors, each with its device; an embedding that is the output matrix too may lie on two."""
    in_layers, at_start = placer(placement, layers, buffers), placer(placement, (CPU,), buffers)
    found = {(name, (at_start if name.startswith(_INPUT) else in_layers)(name)) for name in names}
    tied = {"token_embd.weight"} & set(names) if "output.weight" not in names else set()
    return frozenset(found | {(name, in_layers(name)) for name in tied})


def idle_patterns(names: Sequence[str], overrides: Iterable[tuple[str, str]]) -> list[str]:
    """Patterns that are found in no tensor's name."""
    return [text for text, _ in overrides if not any(map(tensor_pattern(text).search, names))]


def _layer_of(name: str, count: int) -> int:
    words = name.split(".", 2)
    layer = int(words[1]) if len(words) == 3 and words[0] == "blk" and words[1].isdigit() else count
    return min(layer, count - 1)
