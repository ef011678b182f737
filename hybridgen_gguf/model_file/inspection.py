"""What a file holds, told in full: the model's sizes, its tensors, its keys. Renders no template, loads no weights.

`Inspection.as_json` is what `hgguf inspect --json` prints. Long arrays are summarised. Texts are kept as they are in
JSON (which escapes them) and made harmless by `printable` where they meet a terminal. Does not print.
Invariant: every GGUF file that has a sound header can be inspected, also adapters and vocabularies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFile
from ..printable import printable
from ..units import format_size
from .header import ArrayView, TensorInfo, Value
from .kinds import kind_of
from .shape import ModelShape, shape_of
from .split import ModelFile, open_model_file

_SHOWN = 8  # elements of an array that are shown
_LONGEST_TEXT = 1 << 20  # characters of one text in JSON; templates are far shorter


@dataclass(frozen=True, slots=True)
class Inspection:
    """`shape` is None when the file is no complete language model; `note` then says why."""

    file: ModelFile
    shape: ModelShape | None
    note: str

    def as_json(self) -> dict[str, Any]:
        """Keys `model`, `tensors`, `metadata`; bytes as integers; everything encodable as UTF-8."""
        return {
            "model": self._model(),
            "tensors": [_tensor(t, part) for part, h in enumerate(self.file.headers) for t in h.tensors],
            "metadata": {_clean(key): _value(value) for key, value in self.file.metadata.items()},
        }

    def _model(self) -> dict[str, Any]:
        files = [{"path": _clean(str(h.path)), "bytes": h.file_bytes, "version": h.version} for h in self.file.headers]
        kind = kind_of(self.file)
        common = {
            "kind": "language" if kind is None else kind.name,
            "files": files,
            "bytes_file": self.file.bytes,
            "n_tensors": len(self.file.tensors),
        }
        if self.shape is None:
            return {**common, "note": _clean(self.note)}
        shape = self.shape
        return {
            **common,
            "architecture": _clean(shape.architecture),
            "name": _clean(shape.name),
            "file_type": shape.file_type,
            "parameters": shape.parameters,
            "parameters_active": shape.parameters_active,
            "bytes_weights": shape.bytes_weights,
            "bits_per_weight": round(shape.bits_per_weight, 3),
            "n_layers": shape.n_layers,
            "n_embd": shape.n_embd,
            "n_ff": shape.n_ff,
            "n_head": _same(shape.n_head),
            "n_head_kv": _same(shape.n_head_kv),
            "head_k": _same(tuple(layer.head_k for layer in shape.layers)),
            "head_v": _same(tuple(layer.head_v for layer in shape.layers)),
            "n_ctx_train": shape.n_ctx_train,
            "n_vocab": shape.n_vocab,
            "window": shape.window,
            "windowed_layers": [il for il, layer in enumerate(shape.layers) if layer.window],
            "n_expert": shape.n_expert,
            "n_expert_used": shape.n_expert_used,
            "tied_output": shape.tied_output,
            "tokenizer": _clean(shape.tokenizer),
            "add_bos": shape.add_bos,
            "add_eos": shape.add_eos,
            "has_chat_template": shape.chat_template is not None,
            "types": [{"type": s.type, "tensors": s.tensors, "bytes": s.bytes} for s in shape.mix],
        }

    def summary(self) -> tuple[tuple[str, str], ...]:
        """(what, value) for people, safe for a terminal: the model's sizes in a few lines."""
        names = ", ".join(printable(path.name) for path in self.file.paths)
        first: tuple[tuple[str, str], ...] = (("file", f"{names} ({format_size(self.file.bytes)})"),)
        if kind := kind_of(self.file):
            first += (("kind", f"{kind.what}; {kind.hint}"),)
        return first + (_summary(self.shape) if self.shape else (("note", printable(self.note)),))

    def lines(self) -> tuple[str, ...]:
        """The metadata, one `key = value` a line, safe for a terminal."""
        return tuple(f"{printable(key)} = {describe(value)}" for key, value in self.file.metadata.items())


def _summary(shape: ModelShape) -> tuple[tuple[str, str], ...]:
    heads, heads_kv = _same(shape.n_head), _same(shape.n_head_kv)
    rows = [
        ("architecture", printable(shape.architecture)),
        ("parameters", f"{shape.parameters / 1e6:,.1f} M"),
        ("weights", f"{format_size(shape.bytes_weights)}, {shape.bits_per_weight:.2f} bits each"),
        ("types", ", ".join(f"{share.type} {share.bytes / max(shape.bytes_weights, 1):.0%}" for share in shape.mix)),
        ("layers", f"{shape.n_layers}, {shape.n_embd} wide"),
        ("heads", f"{heads}, of keys and values {heads_kv}"),
        ("context", f"{shape.n_ctx_train:,} tokens; KV cache in full {format_size(shape.kv_bytes(shape.n_ctx_train))}"),
        ("vocabulary", f"{shape.n_vocab:,} tokens ({printable(shape.tokenizer) or 'none'})"),
        ("chat template", f"{len(shape.chat_template):,} characters" if shape.chat_template else "none"),
    ]
    if shape.window:
        windowed = sum(layer.window > 0 for layer in shape.layers)
        rows.append(("window", f"{shape.window:,} tokens in {windowed} of {shape.n_layers} layers"))
    if shape.n_expert:
        active = f"{shape.parameters_active / 1e6:,.1f} M parameters a token"
        rows.append(("experts", f"{shape.n_expert}, {shape.n_expert_used} used: {active}"))
    return tuple(rows)


def inspect_file(path: str | os.PathLike[str]) -> Inspection:
    """Inspects the file at `path` with all parts of its set. Raises NotFound or BadFile."""
    file = open_model_file(Path(path))
    try:
        return Inspection(file, shape_of(file), "")
    except BadFile as error:
        return Inspection(file, None, error.what)


def describe(value: Value, limit: int = 200) -> str:
    """A metadata value on one line, safe for a terminal, long ones shortened."""
    if isinstance(value, ArrayView):
        start = ", ".join(printable(str(item), limit=40) for item in value.load(_SHOWN))
        return f"[{start}{', …' if value.count > _SHOWN else ''}] ({value.count:,} {value.type})"
    return printable(str(value), limit=limit)


def _value(value: Value) -> Any:
    if isinstance(value, ArrayView):
        items = [_clean(item) if isinstance(item, str) else _number(item) for item in value.load(_SHOWN)]
        if value.count <= _SHOWN:
            return items
        return {"type": value.type, "count": value.count, "first": items}
    return _clean(value) if isinstance(value, str) else _number(value)


def _number(value: object) -> object:
    # JSON has no NaN and no infinity.
    return str(value) if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


def _clean(text: str) -> str:
    safe = text.encode("utf-8", errors="backslashreplace").decode("utf-8")
    return safe if len(safe) <= _LONGEST_TEXT else safe[:_LONGEST_TEXT] + "…"


def _same(values: tuple[int, ...]) -> int | list[int]:
    """One number when all layers agree."""
    return values[0] if len(set(values)) == 1 else list(values)


def _tensor(tensor: TensorInfo, part: int) -> Mapping[str, Any]:
    return {
        "name": _clean(tensor.name),
        "shape": list(tensor.shape),
        "type": tensor.type,
        "offset": tensor.offset,
        "bytes": tensor.bytes,
        "file": part,
    }
