"""The number formats a GGUF file can hold: id, name, elements and bytes of a block. Pure tables; knows no file.

Source: `enum ggml_type` in ggml.h, the blocks in ggml-common.h, `enum llama_ftype` in llama.h, of the pinned engine.
gguf-py has the same table, but importing it loads numpy, which costs a start 60 ms; a test compares the two.
Invariant: names are upper case and each belongs to one id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..units import round_up

#: GGUF_DEFAULT_ALIGNMENT: the engine's writers pad tensors to it, whatever the source's own alignment is
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block` elements are stored in `bytes` bytes; rows are a multiple of `block` long."""

    id: int
    name: str
    block: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits per element."""
        return self.bytes * 8 / self.block


_ROWS = (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1),
    (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
)  # fmt: skip
GGML_TYPES = {row[0]: GgmlType(*row) for row in _ROWS}
_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip


def ggml_type(name: str) -> GgmlType:
    """The type called `name` in any case. Raises UsageError."""
    kind = _BY_NAME.get(name.upper())
    if kind is None:
        raise UsageError(f"'{name}' is not a number format of the engine", "for the KV cache: f16, q8_0, q4_0, …")
    return kind


def file_type_name(code: object) -> str:
    """The name of a file's mix (`general.file_type`), such as Q4_K_M; empty when unknown."""
    return _FILE_TYPES.get(code, "") if isinstance(code, int) else ""


def row_bytes(name: str, elements: int) -> int:
    """Bytes of a row of `elements`, rounded up to whole blocks."""
    kind = ggml_type(name)
    return -(-elements // kind.block) * kind.bytes


def padded(size: int) -> int:
    """`size` rounded up to the writers' alignment."""
    return round_up(size, ALIGNMENT)


def tensor_bytes(name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor as stored, without padding. `shape`: elements, the row first, as in the file."""
    return row_bytes(name, shape[0]) * math.prod(shape[1:])
