"""Adapters (LoRA) made for tests, and the model that one is worth: its weights with the product added in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

RANK = 4


def factors(model: Path, names: Sequence[str], seed: int = 1, rank: int = RANK) -> dict[str, tuple[Any, Any]]:
    """Weight name → (A [rank, in], B [out, rank]), float32, large enough to be seen in the logits."""
    rng = np.random.default_rng(seed)
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in gguf.GGUFReader(model).tensors}
    found = {}
    for name in names:
        n_in, n_out = shapes[name][:2]
        a = rng.normal(size=(rank, n_in)).astype(np.float32) / np.sqrt(n_in)
        b = rng.normal(size=(n_out, rank)).astype(np.float32) / 2
        found[name] = (a.astype(np.float32), b.astype(np.float32))
    return found


def write_adapter(
    path: Path,
    pairs: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]],
    *,
    alpha: float = 8.0,
    architecture: str = "llama",
    sets: Mapping[str, str] | None = None,
    drop: str = "",
) -> Path:
    """The pairs as an adapter; `sets`: other values of its text keys; `drop`: a tensor that is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    texts = {"general.type": "adapter", "adapter.type": "lora", **(sets or {})}
    for key, text in texts.items():
        writer.add_string(key, text)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        for suffix, values in ((".lora_a", a), (".lora_b", b)):
            if name + suffix != drop:
                writer.add_tensor(name + suffix, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(
    model: Path, path: Path, pairs: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]], factor: float
) -> Path:
    """The model of F32 weights with `factor` B A added to each weight, in place of the bytes in a copy of the file."""
    reader = gguf.GGUFReader(model)
    data = bytearray(model.read_bytes())
    for tensor in reader.tensors:
        if tensor.name in pairs:
            a, b = (part.astype(np.float64) for part in pairs[tensor.name])
            whole = (tensor.data.astype(np.float64) + factor * (b @ a)).astype(np.float32)
            data[tensor.data_offset : tensor.data_offset + whole.nbytes] = whole.tobytes()
    path.write_bytes(data)
    return path
