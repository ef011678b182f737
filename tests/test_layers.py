"""layers.py: windows, recurrent layers and shared caches by architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import rawgguf as raw

from hybridgen_gguf.errors import BadFile, UsageError
from hybridgen_gguf.model_file.header import read_header
from hybridgen_gguf.model_file.layers import Keys, LayerShape, kv_cells, layer_kv_bytes, layer_shapes, window_size


def keys_of(folder: Path, keys: list[bytes]) -> Keys:
    return Keys(read_header(raw.write(folder, raw.gguf_bytes(keys))).metadata, "model.gguf")


def layers_of(folder: Path, arch: str, extra: list[bytes] | None = None, **values: int) -> tuple[LayerShape, ...]:
    return layer_shapes(keys_of(folder, raw.model_keys(arch, **values) + (extra or [])))


def windowed(layers: tuple[LayerShape, ...]) -> str:
    return "".join("w" if layer.window else "F" for layer in layers)


@pytest.mark.parametrize(
    ("arch", "pattern"),
    [
        ("gemma3", "wwwwwFwwwwwF"),
        ("gemma2", "wFwFwFwFwFwF"),
        ("gemma3n", "wwwwFwwwwFww"),
        ("cohere2", "wwwFwwwFwwwF"),
        ("cohere2moe", "FwwwFwwwFwww"),
        ("gpt-oss", "wFwFwFwFwFwF"),
        ("olmo2", "wwwFwwwFwwwF"),
        ("smallthinker", "FwwwFwwwFwww"),
        ("plamo3", "wwwwwwwFwwww"),
        ("deepseek4", "wwwwwwwwwwww"),
        ("llama", "FFFFFFFFFFFF"),
        ("qwen2", "FFFFFFFFFFFF"),
        ("phi3", "FFFFFFFFFFFF"),
    ],
)
def test_pattern_of_the_architecture(tmp_path: Path, arch: str, pattern: str) -> None:
    layers = layers_of(tmp_path, arch, block_count=12, attention__sliding_window=100)
    assert windowed(layers) == pattern


@pytest.mark.parametrize(
    ("arch", "size"), [("gemma2", 4096), ("llama4", 8192), ("exaone-moe", 128), ("gemma3", 0), ("olmo2", 0)]
)
def test_window_when_the_file_names_none(tmp_path: Path, arch: str, size: int) -> None:
    assert window_size(keys_of(tmp_path, raw.model_keys(arch))) == size


def test_llama4_without_windows(tmp_path: Path) -> None:
    assert window_size(keys_of(tmp_path, raw.model_keys("llama4", attention__sliding_window=0))) == 0


def test_exaone4_has_windows_only_at_64_layers(tmp_path: Path) -> None:
    assert windowed(layers_of(tmp_path, "exaone4", block_count=64)).startswith("wwwFwwwF")
    assert "w" not in windowed(layers_of(tmp_path, "exaone4", block_count=30, attention__sliding_window=9))


def test_pattern_in_the_file_wins(tmp_path: Path) -> None:
    flags = raw.array("gemma3.attention.sliding_window_pattern", "bool", [False, True, True, False])
    layers = layers_of(tmp_path, "gemma3", [flags], block_count=4, attention__sliding_window=8)
    assert windowed(layers) == "FwwF"
    layers = layers_of(
        tmp_path, "gemma3", block_count=4, attention__sliding_window=8, attention__sliding_window_pattern=2
    )
    assert windowed(layers) == "wFwF"


def test_heads_by_layer_and_recurrent_layers(tmp_path: Path) -> None:
    heads = raw.array("lfm2.attention.head_count_kv", "i32", [0, 2, 0, 1])
    layers = layers_of(tmp_path, "lfm2", [heads], block_count=4)
    assert [layer.n_head_kv for layer in layers] == [0, 2, 0, 1]
    assert [layer.recurrent for layer in layers] == [True, False, True, False]


def test_linear_attention_by_interval(tmp_path: Path) -> None:
    layers = layers_of(tmp_path, "qwen3next", block_count=8, attention__head_count_kv=2)
    assert [layer.n_head_kv for layer in layers] == [0, 0, 0, 2, 0, 0, 0, 2]
    layers = layers_of(tmp_path, "qwen35", block_count=4, full_attention_interval=2)
    assert [layer.recurrent for layer in layers] == [True, False, True, False]


def test_layers_without_a_cache_of_their_own(tmp_path: Path) -> None:
    draft = layers_of(tmp_path, "glm4moe", block_count=4, nextn_predict_layers=1)
    assert [layer.n_head_kv for layer in draft] == [4, 4, 4, 0]
    shared = layers_of(tmp_path, "gemma3n", block_count=30, attention__sliding_window=512)
    assert sum(layer.n_head_kv > 0 for layer in shared) == 20
    flags = raw.array("gemma4.attention.sliding_window_pattern", "bool", [True] * 6)
    values = {"attention__shared_kv_layers": 2, "attention__sliding_window": 64}
    assert [layer.n_head_kv for layer in layers_of(tmp_path, "gemma4", [flags], block_count=6, **values)] == [4] * 4 + [
        0
    ] * 2


def test_latent_attention_stores_no_values(tmp_path: Path) -> None:
    values = {"attention__key_length": 576, "attention__value_length": 512, "attention__key_length_mla": 192}
    layers = layers_of(tmp_path, "deepseek2", attention__head_count_kv=1, **values)
    assert layer_kv_bytes(layers[0], 256, "f16", "f16", 512) == 256 * 576 * 2


def test_head_sizes_of_windowed_layers(tmp_path: Path) -> None:
    flags = raw.array("gemma4.attention.sliding_window_pattern", "bool", [True, False])
    values = {"attention__key_length": 512, "attention__key_length_swa": 256, "attention__sliding_window": 64}
    layers = layers_of(tmp_path, "gemma4", [flags], **values)
    assert [layer.head_k for layer in layers] == [256, 512]
    assert [layer.head_v for layer in layers] == [16, 16]


def test_cells() -> None:
    assert kv_cells(1, 0, 512) == 256
    assert kv_cells(257, 0, 512) == 512
    assert kv_cells(32768, 512, 512) == 1024
    assert kv_cells(32768, 512, 1) == 768
    assert kv_cells(300, 4096, 512) == 512


def test_kv_types() -> None:
    layer = LayerShape(8, 2, 64, 32, 0, False)
    assert layer_kv_bytes(layer, 256, "f16", "f16", 512) == 256 * (128 + 64) * 2
    assert layer_kv_bytes(layer, 256, "q8_0", "Q4_0", 512) == 256 * (4 * 34 + 2 * 18)
    with pytest.raises(UsageError):
        layer_kv_bytes(layer, 256, "f17", "f16", 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_count": 513}, "at most 512 layers"),
        ({"block_count": 1 << 31}, "at most 512 layers"),
    ],
)
def test_absurd_sizes(tmp_path: Path, change: dict[str, int], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        layers_of(tmp_path, "llama", **change)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (raw.array("llama.attention.head_count_kv", "u32", [1]), "1 elements for 2 layers"),
        (raw.array("llama.attention.head_count_kv", "u32", [1] * 999), "999 elements"),
        (raw.array("llama.attention.head_count_kv", "i32", [1, -1]), "whole number"),
        (raw.key("llama.attention.head_count_kv", "str", "two"), "whole number"),
        (raw.key("llama.attention.head_count_kv", "f32", 2.5), "whole number"),
        (raw.key("llama.attention.head_count_kv", "i32", -2), "whole number"),
    ],
)
def test_wrong_kinds_of_values(tmp_path: Path, extra: bytes, words: str) -> None:
    with pytest.raises(BadFile, match=words):
        layers_of(tmp_path, "llama", [extra])


def test_missing_and_wrong_architecture(tmp_path: Path) -> None:
    for keys in ([], [raw.key("general.architecture", "u32", 1)], [raw.key("general.architecture", "str", "")]):
        with pytest.raises(BadFile, match="architecture"):
            keys_of(tmp_path, keys)
    with pytest.raises(BadFile, match=r"no key 'llama\.block_count'"):
        layer_shapes(keys_of(tmp_path, [raw.key("general.architecture", "str", "llama")]))
