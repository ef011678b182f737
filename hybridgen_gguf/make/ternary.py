"""Types for models that were trained with two or three values a weight, and whether a model is one of these.

Invariant: a warning names the type and what it cost an ordinary model when that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..model_file.header import Header, TensorInfo
from ..model_file.split import ModelFile
from .forecast import TensorForecast

#: enum ggml_type: TQ by BitNet's way of training, Q by that of models of one and two bits
FEW_VALUES = {"TQ1_0": 3, "TQ2_0": 3, "Q1_0": 2, "Q2_0": 4}
_LOOKED_AT = 1 << 14  # values of a tensor
_BLOCK = 64  # values that share one scale, at the least
_READ = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}


def about_types(model: ModelFile, tensors: Sequence[TensorForecast]) -> tuple[str, ...]:
    """A warning where tensors with many values get a type with few."""
    asked = {t.name: t.type for t in tensors if t.type in FEW_VALUES and t.type != t.source_type}
    places = [(header, tensor) for header in model.headers for tensor in header.tensors if tensor.name in asked]
    hurt = sorted({asked[tensor.name] for header, tensor in places if not _has_few(header, tensor, asked[tensor.name])})
    if not hurt:
        return ()
    kinds, values = " and ".join(hurt), " or ".join(str(n) for n in sorted({FEW_VALUES[kind] for kind in hurt}))
    return (
        f"{kinds} keeps {values} values a weight and is for models trained that way (BitNet), which this one is not: "
        "it will write nonsense (SmolLM2's perplexity rose from 33 to over a million with TQ1_0, TQ2_0 and Q2_0)",
    )


def _has_few(header: Header, tensor: TensorInfo, kind: str) -> bool:
    """Whether each block of the tensor's beginning has no more values than `kind` keeps."""
    word = _READ.get(tensor.type)
    if word is None:
        return False  # quantized: not the weights that were trained
    with Path(header.path).open("rb") as file:
        file.seek(header.data_offset + tensor.offset)
        values = np.frombuffer(file.read(min(tensor.bytes, _LOOKED_AT * np.dtype(word).itemsize)), word)
    blocks = np.sort(values[: len(values) // _BLOCK * _BLOCK].reshape(-1, _BLOCK), axis=1)
    return bool(((np.diff(blocks.astype(np.int64), axis=1) != 0).sum(axis=1) < FEW_VALUES[kind]).all())
