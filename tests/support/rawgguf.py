"""GGUF headers byte by byte, so that tests can lie in any field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from hybridgen_gguf.model_file.types import GGML_TYPES

CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "u64": 10, "i64": 11, "f64": 12}
CHARS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?", "u64": "Q"}
CHARS |= {"i64": "q", "f64": "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: str, value: object) -> bytes:
    """A key with a scalar or text value."""
    if kind == "str":
        assert isinstance(value, str | bytes)
        return text(name) + struct.pack("<I", 8) + text(value)
    return text(name) + struct.pack("<I", CODES[kind]) + struct.pack("<" + CHARS[kind], value)


def array(name: str, kind: str, values: Sequence[object]) -> bytes:
    """A key with an array value."""
    if kind == "str":
        body = b"".join(text(value) for value in values)  # type: ignore[arg-type]
        return text(name) + struct.pack("<IIQ", 9, 8, len(values)) + body
    body = struct.pack(f"<{len(values)}{CHARS[kind]}", *values)
    return text(name) + struct.pack("<IIQ", 9, CODES[kind], len(values)) + body


def tensor(name: str, shape: Sequence[int], offset: int, code: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def tensors(shapes: dict[str, Sequence[int]], code: int = 0, alignment: int = 32) -> tuple[list[bytes], int]:
    """Well-placed tensor entries and the bytes of their data."""
    entries, at = [], 0
    for name, shape in shapes.items():
        entries.append(tensor(name, shape, at, code))
        count = 1
        for size in shape:
            count *= size
        size = count // GGML_TYPES[code].block * GGML_TYPES[code].bytes
        at += -(-size // alignment) * alignment
    return entries, at


def gguf_bytes(
    keys: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: int = 0,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A file; `data`: zero bytes after the header; `n_keys`, `n_tensors`: counts to claim instead of the real ones."""
    claimed = len(entries) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    head = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(keys) + b"".join(entries)
    padding = -len(head) % 32 if entries else 0
    return head + bytes(padding + data)


def model_keys(arch: str, **values: int) -> list[bytes]:
    """The keys of a language model; `__` in a name stands for a dot."""
    base = {"context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128}
    base |= {"attention.head_count": 4} | {name.replace("__", "."): value for name, value in values.items()}
    return [key("general.architecture", "str", arch), *(key(f"{arch}.{n}", "u32", v) for n, v in base.items())]


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path
