"""Is a model file sound? Header, shape, vocabulary, optionally every number in it, then the engine in a child.

Each file gives a `FileReport`, whatever it holds; the loop over files never dies. Cheap checks come first, and the
engine (`engine_check`, which runs in a child because some files abort it) is asked only when they found nothing.
Does not print. Invariant: `ok` means `problems` is empty.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import HgError
from ..printable import printable
from .header import ArrayView, TensorInfo
from .kinds import kind_of
from .shape import shape_of
from .split import ModelFile, open_model_file
from .types import GgmlType, ggml_type

EngineCheck = Callable[[Path], str | None]
_SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "seperator", "separator", "padding", "mask", "cls")
_NO_SPECIAL = 0xFFFFFFFF  # how some writers say "none"
_BLOCK = 1 << 24  # bytes scanned at a time
_MOST_VOCABULARY = 64 << 20  # bytes; 262,144 pieces take 4 MiB


@dataclass(frozen=True, slots=True)
class FileReport:
    """`path` as it was given; `problems`: sentences that name the file, or the part of a set, that is at fault.

    `kind`: what a sound file is where it writes no text, else empty.
    """

    path: Path
    ok: bool
    problems: tuple[str, ...]
    kind: str = ""


def validate_files(
    paths: Iterable[str | os.PathLike[str]], engine_check: EngineCheck | None = None, check_tensors: bool = False
) -> tuple[FileReport, ...]:
    """A report for each of `paths`, in order."""
    return tuple(validate_file(path, engine_check, check_tensors) for path in paths)


def validate_file(
    path: str | os.PathLike[str], engine_check: EngineCheck | None = None, check_tensors: bool = False
) -> FileReport:
    """Checks one file (with all parts of its set). `check_tensors`: also looks for NaN and Inf in all weights."""
    path = Path(path)
    shown = printable(str(path))
    try:
        file = open_model_file(path)
        found = [*_shape_problems(file), *vocabulary_problems(file)]
        if check_tensors:
            found += bad_numbers(file)
        if not found and engine_check is not None:
            found = [problem for problem in (engine_check(file.path),) if problem]
    except HgError as error:
        found = [error.what]
    except OSError as error:
        found = [f"cannot be read: {error.strerror}"]
    problems = tuple(text if shown in text or str(path) in text else f"{shown}: {text}" for text in found)
    return FileReport(path, not problems, problems, "" if problems else _kind(file))


def _kind(file: ModelFile) -> str:
    kind = kind_of(file)
    return "" if kind is None else kind.what


def _shape_problems(file: ModelFile) -> list[str]:
    if not file.tensors:
        return ["it holds no tensors, only a header"]
    try:
        shape_of(file)
    except HgError as error:
        return [error.what]
    return []


def vocabulary_problems(file: ModelFile) -> list[str]:
    """Faults of the token list that make the engine abort or read past its tables."""
    view = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(view, ArrayView):
        return [] if view is None else ["key 'tokenizer.ggml.tokens' must be a list of texts"]
    if view.type != "str":
        return [f"key 'tokenizer.ggml.tokens' must be a list of texts, not of {view.type}"]
    return [
        *_repeated(view),
        *_table_lengths(file, view.count),
        *_special_ids(file, view.count),
        *_rows(file, view.count),
    ]


def _repeated(view: ArrayView) -> list[str]:
    pieces = view.load_bytes()
    if len(set(pieces)) == len(pieces):
        return []
    twice = [piece for piece, count in Counter(pieces).items() if count > 1]
    ids = [i for i, piece in enumerate(pieces) if piece == twice[0]][:2]
    text = printable(twice[0].decode("utf-8", errors="replace"), limit=40)
    more = f" (and {len(twice) - 1} other texts)" if len(twice) > 1 else ""
    return [f"tokens {ids[0]} and {ids[1]} have the same text '{text}'{more}"]


def _table_lengths(file: ModelFile, n_tokens: int) -> list[str]:
    problems = []
    for key in ("scores", "token_type"):
        table = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(table, ArrayView) and table.count != n_tokens:
            problems.append(f"tokenizer.ggml.{key} has {table.count:,} entries for {n_tokens:,} tokens")
    return problems


def _special_ids(file: ModelFile, n_tokens: int) -> list[str]:
    problems = []
    for name in _SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        value = file.metadata.get(key)
        if value is None or value == _NO_SPECIAL or value == -1:
            continue
        if not isinstance(value, int) or not 0 <= value < n_tokens:
            problems.append(f"{key} is {value}, outside the {n_tokens:,} tokens")
    return problems


def _rows(file: ModelFile, n_tokens: int) -> list[str]:
    table = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if table is None or len(table.shape) < 2 or table.shape[1] == n_tokens:
        return []
    return [f"token_embd.weight has {table.shape[1]:,} rows for {n_tokens:,} tokens"]


def bad_numbers(file: ModelFile) -> list[str]:
    """Tensors that hold NaN or Inf, in floats or in the scales of blocks. Reads all of them, 16 MiB at a time."""
    return [
        f"tensor '{printable(tensor.name)}' holds NaN or infinity in {count:,} {what}{'s' if count > 1 else ''}"
        for header in file.headers
        for tensor in header.tensors
        for what in ("value" if tensor.type in _EXPONENTS else "scale",)
        if (count := _count_bad(header.path, header.data_offset, tensor))
    ]


# The bits of the exponent, all set in NaN and Inf alone, by format.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F64": ("<u8", 0x7FF << 52)}
# Where the F16 scales of a block lie, in bytes from its start. Source: ggml_validate_row_data (ggml-quants.c) and the
# blocks in ggml-common.h of the pinned engine; a test compares the two. Scales of NVFP4 are always numbers.
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
_SCALE_NAN = 0xFF  # of MXFP4: E8M0


def _count_bad(path: Path, data_offset: int, tensor: TensorInfo) -> int:
    kind = ggml_type(tensor.type)
    most = _BLOCK // kind.bytes * kind.bytes
    bad, left = 0, tensor.bytes
    with path.open("rb") as file:
        file.seek(data_offset + tensor.offset)
        while left:
            block = file.read(min(left, most))
            if not block:
                break
            bad += _bad_in(block, kind)
            left -= len(block)
    return bad


def _bad_in(block: bytes, kind: GgmlType) -> int:
    import numpy as np

    if kind.name in _EXPONENTS:
        word, mask = _EXPONENTS[kind.name]
        return int(np.count_nonzero((np.frombuffer(block, dtype=word) & mask) == mask))
    rows = np.frombuffer(block[: len(block) // kind.bytes * kind.bytes], np.uint8).reshape(-1, kind.bytes)
    if kind.name == "MXFP4":
        return int(np.count_nonzero(rows[:, 0] == _SCALE_NAN))
    if kind.name == "IQ1_M":  # the scale's exponent is spread over two of its bytes
        return int(np.count_nonzero((rows[:, 55] & 0x70 == 0x70) & (rows[:, 53] & 0xC0 == 0xC0)))
    # The high byte of an F16 has the exponent.
    return sum(int(np.count_nonzero((rows[:, at + 1] & 0x7C) == 0x7C)) for at in _SCALES.get(kind.name, ()))
