"""An adapter (LoRA) for a model, from its header: whether it is one, whether it fits the model, how large it is.

The rules are those of llama_adapter_lora_init (llama-adapter.cpp). No weights are read. Invariant: an adapter that
passes `check_adapter` names only weights that the model has, in their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import BadFile
from ..printable import printable
from .header import Header, TensorInfo, read_header
from .split import ModelFile

_A, _B = ".lora_a", ".lora_b"
_TOKENS = "adapter.alora.invocation_tokens"


def check_adapter(path: str, model: ModelFile) -> None:
    """Raises NotFound, or BadFile for a file that is no adapter, or one of another model."""
    header = read_header(Path(path))
    shown, known = printable(path), header.metadata
    if known.get("general.type") != "adapter":
        raise BadFile(f"{shown} is not an adapter (LoRA)", "llama.cpp's convert_lora_to_gguf.py makes one")
    if known.get("adapter.type") != "lora":
        kind = printable(str(known.get("adapter.type", "none")), limit=40)
        raise BadFile(f"{shown} is an adapter of type {kind}, and only lora is known", "give a LoRA adapter")
    if _TOKENS in known:
        raise BadFile(f"{shown} is an activated LoRA, which starts at certain tokens", "llama.cpp's server runs it")
    if not isinstance(known.get("adapter.lora.alpha", 0.0), float):
        raise BadFile(f"{shown} is damaged: adapter.lora.alpha is no number", "convert the adapter again")
    ours, theirs = (str(file.get("general.architecture", "")) for file in (model.metadata, known))
    if ours != theirs:
        what = f"{shown} is an adapter for architecture {printable(theirs, limit=40)}, and the model is {ours}"
        raise BadFile(what, "give the model that it was made for")
    _check_pairs(header, model, shown)


def adapter_pairs(path: str) -> dict[str, int]:
    """Name of a weight → bytes of the pair of matrices over it."""
    return {name: sum(part.bytes for part in pair.values()) for name, pair in _pairs(read_header(Path(path))).items()}


def _pairs(header: Header) -> dict[str, dict[str, TensorInfo]]:
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for tensor in header.tensors:
        for suffix in (_A, _B):
            if tensor.name.endswith(suffix):
                pairs.setdefault(tensor.name.removesuffix(suffix), {})[suffix] = tensor
    return pairs


def _check_pairs(header: Header, model: ModelFile, shown: str) -> None:
    strange = [t.name for t in header.tensors if not t.name.endswith((_A, _B, "_norm.weight"))]
    if strange:
        raise BadFile(
            f"{shown} holds {printable(strange[0], limit=80)}, which is no part of a LoRA", "convert it again"
        )
    weights = {tensor.name: tensor for tensor in model.tensors}
    for name, pair in _pairs(header).items():
        named = printable(name, limit=80)
        if len(pair) < 2:
            raise BadFile(f"{shown} holds half a pair for {named}", "convert the adapter again")
        if name not in weights:
            raise BadFile(f"{shown} changes {named}, which this model does not have", "give the model it was made for")
        if why := _misfit(name, pair, weights[name]):
            what = f"{shown} does not fit this model: {named} {why}"
            raise BadFile(what, "give the model that it was made for")


def _misfit(name: str, pair: Mapping[str, TensorInfo], weight: TensorInfo) -> str:
    """Why the pair cannot be added to the weight; empty when it can."""
    (a0, a1, *a2), (b0, b1, *b2), (w0, w1, *w2) = (_shape(t) for t in (pair[_A], pair[_B], weight))
    if name.endswith("token_embd.weight"):  # looked up, not multiplied: A and B have changed places
        fits, wanted = (b1, a1) == (w0, w1), f"{w0} x {w1}"
        ranks = a0, b0
    else:
        fits, wanted = (a0, b1) == (w0, w1), f"{w0} x {w1}"
        ranks = a1, b0
    if not fits:
        return f"is {wanted}, and its matrices are {a0} x {a1} and {b0} x {b1}"
    if ranks[0] != ranks[1] or ranks[0] < 1:
        return f"has matrices of ranks {ranks[0]} and {ranks[1]}"
    return "" if a2 == b2 == w2 else "has another number of experts than its matrices"


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    return (*tensor.shape, *(1,) * (4 - len(tensor.shape)))
