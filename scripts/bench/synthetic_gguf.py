"""Writes a llama of any shape with random weights, Q4_K or F16: true speeds, no sensible text. Needs numpy and gguf.

python synthetic_gguf.py OUT.gguf LAYERS WIDTH FFN HEADS KV_HEADS VOCABULARY [F16]
(Llama-3-8B: 32 4096 14336 32 8 128256)
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 256, 144  # Q4_K: d and dmin in F16, 12 bytes of scales, 128 bytes of quants
Shape = tuple[int, int, int, int, int, int]  # layers, width, FFN, heads, KV heads, vocabulary


def weights(rng: np.random.Generator, dims: tuple[int, ...], f16: bool) -> NDArray[np.generic]:
    """Random weights, small, so that activations stay finite; repeated beyond some MB: only speed counts."""
    if f16:
        some = rng.normal(0, 0.02, min(math.prod(dims), 1 << 22)).astype(np.float16)
        return np.resize(some, dims)
    blocks = math.prod(dims) // BLOCK
    data = rng.integers(0, 256, (min(blocks, 1 << 16), BLOCK_BYTES), dtype=np.uint8)
    data[:, :4] = np.frombuffer(np.array([2.5e-5, 1.2e-4], np.float16).tobytes(), np.uint8)
    return np.resize(data, (blocks, BLOCK_BYTES)).reshape(*dims[:-1], -1)


def write(out: Path, name: str, shape: Shape, experts: tuple[int, int] = (0, 0), f16: bool = False) -> None:
    """A llama, or a Qwen3 with `experts` (how many, how many are used)."""
    layers, width, ffn, heads, kv_heads, vocabulary = shape
    head = 128 if experts[0] else width // heads
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(str(out), "qwen3moe" if experts[0] else "llama")
    w.add_name(name)
    w.add_context_length(131072)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(500000.0)
    w.add_rope_dimension_count(head)
    w.add_vocab_size(vocabulary)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if f16 else gguf.LlamaFileType.MOSTLY_Q4_K_M)
    if experts[0]:
        w.add_expert_count(experts[0])
        w.add_expert_used_count(experts[1])
        w.add_expert_feed_forward_length(ffn)

    kind = gguf.GGMLQuantizationType.F16 if f16 else gguf.GGMLQuantizationType.Q4_K
    arrays: dict[tuple[int, ...], NDArray[np.generic]] = {}  # the writer keeps all until the end: alike ones share one

    def add(tensor: str, *dims: int) -> None:
        if dims not in arrays:
            arrays[dims] = weights(rng, dims, f16)
        w.add_tensor(f"{tensor}.weight", arrays[dims], raw_dtype=kind)

    def ones(tensor: str, size: int) -> None:
        w.add_tensor(f"{tensor}.weight", np.ones(size, np.float32))

    add("token_embd", vocabulary, width)
    ones("output_norm", width)
    add("output", vocabulary, width)
    for i in range(layers):
        at = f"blk.{i}."
        ones(at + "attn_norm", width)
        ones(at + "ffn_norm", width)
        add(at + "attn_q", heads * head, width)
        add(at + "attn_k", kv_heads * head, width)
        add(at + "attn_v", kv_heads * head, width)
        add(at + "attn_output", width, heads * head)
        each, suffix = ((experts[0],), "_exps") if experts[0] else ((), "")
        if experts[0]:
            ones(at + "attn_q_norm", head)
            ones(at + "attn_k_norm", head)
            w.add_tensor(f"{at}ffn_gate_inp.weight", rng.normal(0, 0.02, (*each, width)).astype(np.float32))
        add(f"{at}ffn_gate{suffix}", *each, ffn, width)
        add(f"{at}ffn_up{suffix}", *each, ffn, width)
        add(f"{at}ffn_down{suffix}", *each, width, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    layers, width, ffn, heads, kv_heads, vocabulary = map(int, sys.argv[2:8])
    shape = (layers, width, ffn, heads, kv_heads, vocabulary)
    write(Path(sys.argv[1]), "synthetic", shape, f16=sys.argv[8:] == ["F16"])
