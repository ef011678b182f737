"""inspection.py: everything told, nothing rendered, nothing that a terminal would obey."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.errors import BadFile
from hybridgen_gguf.model_file.header import read_header
from hybridgen_gguf.model_file.inspection import describe, inspect_file


def test_json_document(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "模型.gguf", template="{{ x }}")
    document = json.loads(json.dumps(inspect_file(path).as_json()))
    assert sorted(document) == ["metadata", "model", "tensors"]
    assert document["model"]["n_layers"] == 2 and document["model"]["has_chat_template"]
    assert document["model"]["n_head_kv"] == 2 and document["model"]["files"][0]["path"] == str(path)
    assert document["tensors"][0] == {
        "name": "token_embd.weight", "shape": [64, 259], "type": "F32", "offset": 0, "bytes": 66304, "file": 0,
    }  # fmt: skip
    assert document["metadata"]["tokenizer.ggml.tokens"]["count"] == 259
    assert document["metadata"]["tokenizer.ggml.tokens"]["first"][:2] == ["<unk>", "<s>"]
    assert document["metadata"]["tokenizer.chat_template"] == "{{ x }}"


def test_split_set(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "m.gguf", split=7)
    document = inspect_file(path.with_name("m-00002-of-00003.gguf")).as_json()
    assert len(document["model"]["files"]) == 3 and len(document["tensors"]) == 20
    assert {tensor["file"] for tensor in document["tensors"]} == {0, 1, 2}


def test_what_is_no_model_is_still_told(tmp_path: Path) -> None:
    keys = [raw.key("general.architecture", "str", "llama"), raw.key("general.type", "str", "adapter")]
    seen = inspect_file(raw.write(tmp_path, raw.gguf_bytes(keys)))
    assert seen.shape is None and "adapter" in seen.as_json()["model"]["note"]
    assert seen.as_json()["metadata"]["general.type"] == "adapter"


def test_hostile_texts(tmp_path: Path) -> None:
    keys = [
        *raw.model_keys("llama"),
        raw.key("general.name", "str", "\x1b]0;owned\x07\nerror: fake"),
        raw.key("k\x1b[31m", "str", b"\xff\xfe broken"),
        raw.array("a", "str", ["\x1b[2J"] * 20),
        raw.key("nan", "f32", float("nan")),
        raw.array("floats", "f32", [float("inf"), 1.0]),
        raw.key("long", "str", "x" * 5000),
    ]
    seen = inspect_file(raw.write(tmp_path, raw.gguf_bytes(keys)))
    assert json.loads(json.dumps(seen.as_json(), allow_nan=False))["metadata"]["floats"] == ["inf", 1.0]
    for line in seen.lines():
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in line)
        assert len(line) < 500
    assert "\\x1b]0;owned\\x07\\nerror: fake" in seen.lines()[6]


def test_summary(tmp_path: Path) -> None:
    rows = dict(inspect_file(tinygguf.build(tmp_path / "t.gguf")).summary())
    assert rows["file"] == "t.gguf (361.47 KiB)"
    assert rows["layers"] == "2, 64 wide" and rows["heads"] == "4, of keys and values 2"
    assert rows["context"] == "128 tokens; KV cache in full 64.00 KiB"
    assert rows["chat template"] == "none" and "window" not in rows and "experts" not in rows
    keys = raw.model_keys("gpt-oss", expert_count=8, expert_used_count=2, attention__sliding_window=64)
    keys += [raw.key("general.name", "str", "\x1b[2J"), raw.key("tokenizer.ggml.model", "str", "\x1b[2J")]
    rows = dict(inspect_file(raw.write(tmp_path, raw.gguf_bytes(keys))).summary())
    assert rows["window"] == "64 tokens in 1 of 2 layers" and rows["experts"].startswith("8, 2 used")
    assert not any("\x1b" in value for value in rows.values())
    adapter = [raw.key("general.architecture", "str", "llama"), raw.key("general.type", "str", "adapter")]
    assert "adapter" in dict(inspect_file(raw.write(tmp_path, raw.gguf_bytes(adapter))).summary())["note"]


def test_describe_arrays(tmp_path: Path) -> None:
    keys = [raw.array("short", "u32", [1, 2]), raw.array("long", "u32", list(range(20)))]
    values = read_header(raw.write(tmp_path, raw.gguf_bytes(keys))).metadata
    assert describe(values["short"]) == "[1, 2] (2 u32)"
    assert describe(values["long"]) == "[0, 1, 2, 3, 4, 5, 6, 7, …] (20 u32)"


def test_bad_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile):
        inspect_file(raw.write(tmp_path, b"text"))
