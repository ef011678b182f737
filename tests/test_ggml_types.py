"""ggml_types.py against gguf-py's table."""

from __future__ import annotations

import gguf
import pytest

from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.model_file.types import GGML_TYPES, file_type_name, ggml_type, row_bytes

# gguf-py 0.19 counts two 4-byte scales in a Q8_1 block; the engine stores two of 2 bytes.
DIFFERENT = {"Q8_1"}


def test_table_matches_gguf_py() -> None:
    for kind, (block, size) in gguf.constants.GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[kind.value]
        assert ours.name == kind.name
        assert (ours.block, ours.bytes) == (block, size) or ours.name in DIFFERENT


def test_file_types_match_gguf_py() -> None:
    for kind in gguf.LlamaFileType:
        if kind.name != "GUESSED":
            assert file_type_name(kind.value) == kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    assert file_type_name(12345) == file_type_name("x") == ""


def test_rows_are_whole_blocks() -> None:
    assert row_bytes("q8_0", 192) == 6 * 34
    assert row_bytes("Q8_0", 193) == 7 * 34
    assert row_bytes("f16", 0) == 0
    assert GGML_TYPES[12].bits == 4.5


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match="q9_9"):
        ggml_type("q9_9")
