"""Writes a llama of any shape with random weights, Q4_K or F16: true speeds, no sensible text. Needs numpy and gguf.

python synthetic_gguf.py OUT.gguf LAYERS WIDTH FFN HEADS KV_HEADS VOCABULARY [F16]
(Llama-3-8B: 32 4096 14336 32 8 128256)
"""

from __future__ import annotations

import sys

import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 256, 144  # Q4_K: d and dmin in F16, 12 bytes of scales, 128 bytes of quants


def weights(rng: np.random.Generator, rows: int, columns: int, f16: bool) -> NDArray[np.generic]:
    """Random weights, small, so that activations stay finite; repeated beyond some MB: only speed counts."""
    if f16:
        some = rng.normal(0, 0.02, min(rows * columns, 1 << 22)).astype(np.float16)
        return np.resize(some, (rows, columns))
    blocks = rows * columns // BLOCK
    data = rng.integers(0, 256, (min(blocks, 1 << 16), BLOCK_BYTES), dtype=np.uint8)
    data[:, :4] = np.frombuffer(np.array([2.5e-5, 1.2e-4], np.float16).tobytes(), np.uint8)
    return np.resize(data, (blocks, BLOCK_BYTES)).reshape(rows, -1)


def main() -> None:
    out = sys.argv[1]
    layers, width, ffn, heads, kv_heads, vocabulary = map(int, sys.argv[2:8])
    f16 = sys.argv[8:] == ["F16"]
    kv_width = width // heads * kv_heads
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(out, "llama")
    w.add_name("synthetic")
    w.add_context_length(131072)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(500000.0)
    w.add_rope_dimension_count(width // heads)
    w.add_vocab_size(vocabulary)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if f16 else gguf.LlamaFileType.MOSTLY_Q4_K_M)

    def add(name: str, rows: int, columns: int) -> None:
        kind = gguf.GGMLQuantizationType.F16 if f16 else gguf.GGMLQuantizationType.Q4_K
        w.add_tensor(f"{name}.weight", weights(rng, rows, columns, f16), raw_dtype=kind)

    def norm(name: str) -> None:
        w.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    add("token_embd", vocabulary, width)
    norm("output_norm")
    add("output", vocabulary, width)
    for i in range(layers):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        add(f"blk.{i}.attn_q", width, width)
        add(f"blk.{i}.attn_k", kv_width, width)
        add(f"blk.{i}.attn_v", kv_width, width)
        add(f"blk.{i}.attn_output", width, width)
        add(f"blk.{i}.ffn_gate", ffn, width)
        add(f"blk.{i}.ffn_up", ffn, width)
        add(f"blk.{i}.ffn_down", width, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
