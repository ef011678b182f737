"""validation.py: one report a file, whatever it holds."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import EngineError
from hybridgen_gguf.model_file.types import GGML_TYPES, ggml_type
from hybridgen_gguf.model_file.validation import _bad_in, validate_file, validate_files


def test_sound_file_and_engine_check(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "t.gguf")
    asked: list[Path] = []

    def engine(file: Path) -> str | None:
        asked.append(file)
        return None

    report = validate_file(path, engine, check_tensors=True)
    assert (report.path, report.ok, report.problems) == (path, True, ())
    assert asked == [path]


def test_engine_problem_and_engine_failure(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "t.gguf")
    assert validate_file(path, lambda _: "the engine refuses it").problems == (f"{path}: the engine refuses it",)
    assert validate_file(path, lambda file: f"{file} is odd").problems == (f"{path} is odd",)

    def broken(_: Path) -> str | None:
        raise EngineError("no engine here")

    assert validate_files([path, path], broken)[1].problems == (f"{path}: no engine here",)


def test_the_engine_is_not_asked_about_a_bad_file(tmp_path: Path) -> None:
    def engine(_: Path) -> str | None:
        raise AssertionError("asked")

    path = tinygguf.build(tmp_path / "t.gguf", tokens={100: "<0x41>"})
    assert not validate_file(path, engine).ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sets": ["tokenizer.ggml.bos_token_id=u32:5000"]}, "bos_token_id is 5000, outside the 259 tokens"),
        ({"sets": ["tokenizer.ggml.padding_token_id=i32:-7"]}, "padding_token_id is -7"),
        ({"sets": ["tokenizer.ggml.eot_token_id=str:x"]}, "eot_token_id is x"),
        ({"drops": ["output_norm.weight", "llama.block_count"]}, "no key 'llama.block_count'"),
        ({"tokens": {100: "<0x41>", 101: "<0x41>", 110: "<0x42>"}}, "'<0x41>' (and 1 other texts)"),
    ],
)
def test_faults_of_vocabulary_and_keys(tmp_path: Path, change: dict[str, object], words: str) -> None:
    report = validate_file(tinygguf.build(tmp_path / "t.gguf", **change))  # type: ignore[arg-type]
    assert not report.ok and any(words in problem for problem in report.problems)


def test_ids_that_mean_none_are_fine(tmp_path: Path) -> None:
    sets = ["tokenizer.ggml.padding_token_id=u32:4294967295", "tokenizer.ggml.mask_token_id=i32:-1"]
    assert validate_file(tinygguf.build(tmp_path / "t.gguf", sets=sets)).ok


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([raw.key("tokenizer.ggml.tokens", "str", "a")], "must be a list of texts"),
        ([raw.array("tokenizer.ggml.tokens", "u32", [1])], "not of u32"),
        ([raw.array("tokenizer.ggml.tokens", "str", ["a"] * 9)], "tokens 0 and 1 have the same text 'a'"),
        ([raw.array("tokenizer.ggml.tokens", "str", ["\x1b[2J"] * 2)], "'\\x1b[2J'"),
        ([raw.array("tokenizer.ggml.tokens", "str", "abc")], "rows for 3 tokens"),
        (
            [raw.array("tokenizer.ggml.tokens", "str", "abcdefgh"), raw.array("tokenizer.ggml.scores", "f32", [0.0])],
            "scores has 1 entries for 8 tokens",
        ),
        (
            [
                raw.array("tokenizer.ggml.tokens", "str", "abcdefgh"),
                raw.array("tokenizer.ggml.token_type", "i32", [0] * 9),
            ],
            "token_type has 9 entries for 8 tokens",
        ),
    ],
)
def test_token_tables(tmp_path: Path, keys: list[bytes], words: str) -> None:
    entries, data = raw.tensors({"token_embd.weight": [64, 8]})
    report = validate_file(raw.write(tmp_path, raw.gguf_bytes(raw.model_keys("llama") + keys, entries, data)))
    assert not report.ok and any(words in problem for problem in report.problems)


def test_header_without_tensors(tmp_path: Path) -> None:
    assert "no tensors" in validate_file(raw.write(tmp_path, raw.gguf_bytes(raw.model_keys("llama")))).problems[0]


def test_missing_file_is_a_report(tmp_path: Path) -> None:
    report = validate_file(tmp_path / "none.gguf")
    assert not report.ok and "does not exist" in report.problems[0]


@pytest.mark.parametrize("code", [0, 1, 30, 28])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinity_are_found(tmp_path: Path, code: int, value: str) -> None:
    bits = np.float32(value).tobytes()
    encoded = {0: bits, 1: np.float16(value).tobytes(), 30: bits[2:], 28: struct.pack("<d", float(value))}[code]
    entries, data = raw.tensors({"token_embd.weight": [64, 8], "x": [32]}, code)
    whole = bytearray(raw.gguf_bytes(raw.model_keys("llama"), entries, data))
    assert validate_file(raw.write(tmp_path, bytes(whole)), check_tensors=True).ok
    start = len(whole) - 32 * len(encoded) + 3 * len(encoded)
    whole[start : start + len(encoded)] = encoded
    path = raw.write(tmp_path, bytes(whole))
    assert validate_file(path).ok
    problems = validate_file(path, check_tensors=True).problems
    assert problems == (f"{path}: tensor 'x' holds NaN or infinity in 1 value",)


# Q8_1 and Q8_K are never in files; of F64 the engine calls infinite what is so in F32.
KINDS = sorted(kind.name for kind in GGML_TYPES.values() if kind.name not in ("Q8_1", "Q8_K", "F64"))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_blocks_are_those_that_the_engine_refuses(engine: Library, kind: str) -> None:
    """Random bytes in every format: what the engine's own check refuses is found, and nothing else."""
    check = ctypes.CDLL(str(engine.folder / "libggml-base.so")).ggml_validate_row_data
    check.restype, check.argtypes = ctypes.c_bool, [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    number = ggml_type(kind)
    rng = np.random.default_rng(3)
    seen = set()
    for index in range(600):
        block = bytearray(rng.integers(0, 256, number.bytes, dtype=np.uint8).tobytes())
        if index % 3:  # otherwise nearly all blocks of some formats are sound
            for at in range(number.bytes):
                block[at] |= 0xF0 if rng.random() < 0.5 else 0
        sound = check(number.id, bytes(block), len(block))
        seen.add(sound)
        assert sound == (_bad_in(bytes(block), number) == 0), (kind, block.hex())
    assert seen == {True} if kind in ("NVFP4", "I8", "I16", "I32", "I64") else seen == {True, False}
