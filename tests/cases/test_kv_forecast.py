"""KV bytes follow type, block overhead and windows, from header data alone (D-13, D-14)."""

from __future__ import annotations

from pathlib import Path

import pytest
import rawgguf as raw

from hybridgen_gguf.model_file.shape import ModelShape, read_shape

MIB = 1 << 20


def smol(folder: Path) -> ModelShape:
    """The figures of SmolLM2-135M: 30 layers, 3 KV heads of 64."""
    values = {"block_count": 30, "embedding_length": 576, "context_length": 8192, "feed_forward_length": 1536}
    keys = raw.model_keys("llama", attention__head_count=9, attention__head_count_kv=3, **values)
    return read_shape(raw.write(folder, raw.gguf_bytes(keys)))


def gemma(folder: Path, arch: str = "gemma3", **more: int) -> ModelShape:
    """The figures of Gemma 3 270M: 18 layers, window 512, one KV head of 256, no key for the pattern."""
    values = {"block_count": 18, "embedding_length": 640, "context_length": 32768, "attention.sliding_window": 512}
    values |= {"attention.key_length": 256, "attention.value_length": 256, "attention.head_count_kv": 1, **more}
    return read_shape(raw.write(folder, raw.gguf_bytes(raw.model_keys(arch, **values))))


@pytest.mark.parametrize(("kind", "mib"), [("f16", 180.0), ("q8_0", 95.625), ("q4_0", 50.625), ("f32", 360.0)])
def test_d13_types(tmp_path: Path, kind: str, mib: float) -> None:
    assert smol(tmp_path).kv_bytes(8192, kind, kind) == mib * MIB


def test_d13_mixed_types_lie_between(tmp_path: Path) -> None:
    assert smol(tmp_path).kv_bytes(8192, "q8_0", "q4_0") == (95.625 + 50.625) / 2 * MIB


def test_d14_windowed_layers_cost_window_and_batch(tmp_path: Path) -> None:
    shape = gemma(tmp_path)
    assert shape.kv_bytes(32768) == 111 * MIB
    assert sorted(shape.kv_bytes_per_layer(32768)) == [MIB] * 15 + [32 * MIB] * 3
    assert [il for il, layer in enumerate(shape.layers) if not layer.window] == [5, 11, 17]


def test_d14_a_model_without_windows_pays_in_full(tmp_path: Path) -> None:
    assert gemma(tmp_path, "qwen3").kv_bytes(32768) == 576 * MIB


def test_d14_grows_with_the_micro_batch_and_stops_at_the_context(tmp_path: Path) -> None:
    shape = gemma(tmp_path)
    sizes = [shape.kv_bytes(32768, n_ubatch=n) for n in (1, 512, 2048)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    assert shape.kv_bytes(512) == gemma(tmp_path, "qwen3").kv_bytes(512)
