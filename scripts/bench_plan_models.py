"""The models of bench_plan_gpu.py: random Q4_K weights in the shapes of known models. Needs numpy and gguf."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

# layers, width, FFN, heads, KV heads, vocabulary, experts, used (0: dense)
SHAPES = {
    "dense8": (32, 4096, 14336, 32, 8, 128256, 0, 0),
    "dense32": (64, 5120, 27648, 40, 8, 151936, 0, 0),
    "experts30": (48, 2048, 768, 32, 4, 151936, 128, 8),
    "tiny": (4, 512, 1024, 8, 4, 512, 0, 0),
}


def write_model(out: Path, name: str) -> None:
    """A llama, or a Qwen3 with experts, with random Q4_K weights."""
    import gguf  # late: the engine must be loaded before numpy in the processes that measure
    import numpy as np

    layers, width, ffn, heads, kv_heads, vocab, experts, used = SHAPES[name]
    head = 128 if experts else width // heads
    arch = "qwen3moe" if experts else "llama"
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (1 << 16, 144), dtype=np.uint8)
    block[:, :4] = np.frombuffer(np.array([2.5e-5, 1.2e-4], np.float16).tobytes(), np.uint8)
    w = gguf.GGUFWriter(str(out), arch)
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
    w.add_vocab_size(vocab)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(15)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(used)
        w.add_expert_feed_forward_length(ffn)

    arrays: dict[tuple[int, ...], Any] = {}  # the writer keeps tensors until the end: alike ones share one array

    def add(tensor: str, *dims: int) -> None:
        if dims not in arrays:
            data = np.resize(block, (math.prod(dims) // 256, 144))
            arrays[dims] = data.reshape(*dims[:-1], dims[-1] // 256 * 144)
        w.add_tensor(f"{tensor}.weight", arrays[dims], raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    def ones(tensor: str, size: int) -> None:
        w.add_tensor(f"{tensor}.weight", np.ones(size, np.float32))

    add("token_embd", vocab, width)
    ones("output_norm", width)
    add("output", vocab, width)
    for i in range(layers):
        at = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            ones(at + norm, width)
        add(at + "attn_q", heads * head, width)
        add(at + "attn_k", kv_heads * head, width)
        add(at + "attn_v", kv_heads * head, width)
        add(at + "attn_output", width, heads * head)
        if experts:
            ones(at + "attn_q_norm", head)
            ones(at + "attn_k_norm", head)
            w.add_tensor(f"{at}ffn_gate_inp.weight", rng.normal(0, 0.02, (experts, width)).astype(np.float32))
            for part, dims in (("gate", (experts, ffn, width)), ("up", (experts, ffn, width)),
                               ("down", (experts, width, ffn))):  # fmt: skip
                add(f"{at}ffn_{part}_exps", *dims)
        else:
            add(at + "ffn_gate", ffn, width)
            add(at + "ffn_up", ffn, width)
            add(at + "ffn_down", width, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2])
