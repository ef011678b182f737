"""What is wrong with a Hugging Face folder is found before a tensor is read, and named; nothing in it is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_folder import TOKENS, llama_tensors, write_folder, write_json, write_safetensors

from hybridgen_gguf.errors import BadFile, Failed, HgError, NotFound, UsageError
from hybridgen_gguf.make import convert as module
from hybridgen_gguf.make.convert import ConvertOptions, convert
from hybridgen_gguf.make.folder import hashed_files, pre_tokenizer_of, read_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "模型")


def test_a_sound_folder(folder: Path) -> None:
    found = read_folder(folder)
    assert (found.rows, len(found.tokens), found.pickled, found.wants_code) == (TOKENS, TOKENS, False, ())
    assert found.elements == sum(values.size for values in llama_tensors(TOKENS).values())
    names = [path.name for path in hashed_files(found)]
    assert names == ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    assert "Regex" in pre_tokenizer_of(folder)


def _shards(folder: Path) -> None:
    tensors = llama_tensors(TOKENS)
    names = list(tensors)
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for index, name in enumerate(files):
        write_safetensors(folder / name, {key: tensors[key] for key in names[index::3]})
    mapping = {key: files[i % 3] for i, key in enumerate(names)}
    write_json(folder / "model.safetensors.index.json", {"weight_map": mapping})
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    _shards(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()


def _missing_shard_no_index(folder: Path) -> None:
    _missing_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def _lost_tensor(folder: Path) -> None:
    _shards(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00003.safetensors"
    write_json(folder / "model.safetensors.index.json", index)


def _outside(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "../../etc/passwd"}})


def _change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | changes)

    return change


def _cut(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def _text_for_weights(text: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(text)

    return change


def _only(name: str, content: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write_json(folder / name, content)

    return change


def _extra_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(
        folder / "model.safetensors", {**llama_tensors(TOKENS), name: llama_tensors(2)["model.norm.weight"]}
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_missing_shard, NotFound, ["1 of 3 weight files are missing", "model-00002-of-00003.safetensors"]),
        (_missing_shard_no_index, NotFound, ["a weight file is missing", "model-00002-of-00003.safetensors"]),
        (_lost_tensor, BadFile, ["names 1 tensors that no file has", "model.layers.9.mlp.up_proj.weight"]),
        (_outside, BadFile, ["names a file outside the folder", "../../etc/passwd"]),
        (_cut(5000), BadFile, ["model.safetensors is cut short"]),
        (_cut(100), BadFile, ["is cut short: its header claims"]),
        (_cut(0), BadFile, ["is not a safetensors file"]),
        (_text_for_weights(b"version https://git-lfs.github.com/spec/v1\n"), BadFile, ["a Git LFS pointer"]),
        (_text_for_weights((1 << 60).to_bytes(8, "little") + b"{}"), BadFile, ["is cut short"]),
        (_text_for_weights((2).to_bytes(8, "little") + b"{]"), BadFile, ["damaged header"]),
        (_text_for_weights((9).to_bytes(8, "little") + b'{"a": 5} '), BadFile, ["damaged header"]),
        (_only("adapter_config.json", {"base_model_name_or_path": "a/b"}), Failed, ["adapter (LoRA) for a/b"]),
        (_only("other.json", {}), NotFound, ["holds no weights"]),
        (_change_config(quantization_config={"quant_method": "gptq"}), Failed, ["already quantized with GPTQ"]),
        (_change_config(quantization_config={"quant_method": "AWQ"}), Failed, ["already quantized with AWQ"]),
        (_change_config(quantization_config={"load_in_4bit": True}), Failed, ["already quantized with bitsandbytes"]),
        (lambda f: write_json(f / "quantize_config.json", {"bits": 4}), Failed, ["already quantized with GPTQ"]),
        (_extra_tensor("model.layers.0.mlp.up_proj.qweight"), Failed, ["already quantized with GPTQ or AWQ"]),
        (_extra_tensor("model.layers.0.mlp.up_proj.SCB"), Failed, ["already quantized with bitsandbytes"]),
        (lambda f: (f / "config.json").unlink(), NotFound, ["config.json is missing"]),
        (lambda f: (f / "config.json").write_text("{"), BadFile, ["config.json is not valid JSON"]),
        (lambda f: (f / "config.json").write_text("[" * 100_000), BadFile, ["config.json is not valid JSON"]),
        (lambda f: (f / "config.json").write_text("[]"), BadFile, ["does not hold a JSON object"]),
    ],
)  # fmt: skip
def test_faults_are_named(folder: Path, change: Callable[[Path], None], error: type[HgError], words: list[str]) -> None:
    change(folder)
    with pytest.raises(error) as caught:
        read_folder(folder)
    for word in words:
        assert word in caught.value.what


def test_shards_with_an_index_are_read(folder: Path) -> None:
    _shards(folder)
    found = read_folder(folder)
    assert (len(found.weights), len(found.tensors)) == (3, 20)


def test_options_that_make_no_sense(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'q4_0' is not a type that convert writes"):
        convert(ConvertOptions(folder, tmp_path / "o.gguf", "q4_0"))
    with pytest.raises(NotFound, match="does not exist"):
        convert(ConvertOptions(tmp_path / "nowhere", tmp_path / "o.gguf"))
    with pytest.raises(UsageError, match="is not a folder"):
        convert(ConvertOptions(folder / "config.json", tmp_path / "o.gguf"))
    with pytest.raises(NotFound, match="output folder"):
        convert(ConvertOptions(folder, tmp_path / "nowhere" / "o.gguf"))


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source" / "conversion").mkdir(parents=True)
    (tmp_path / "source" / "conversion" / "base.py").write_text('            res = "llama-bpe"\n', encoding="utf-8")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    options = ConvertOptions(folder, tmp_path / "o.gguf", source_dir=tmp_path / "source")
    with pytest.raises(Failed, match="not installed: torch"):
        convert(options)
    with pytest.raises(UsageError, match="'nope' is not a pre-tokenizer of the engine"):
        convert(ConvertOptions(folder, tmp_path / "o.gguf", pre_tokenizer="nope", source_dir=tmp_path / "source"))
    assert not (tmp_path / "o.gguf").exists()
