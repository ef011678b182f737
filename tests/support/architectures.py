"""Tiny loadable models of other architectures, with random weights and every byte a token: t5, mamba, bpe.

`bpe` is a llama with a byte-level BPE vocabulary and any pre-tokenizer. All are under 1 MB and pass `hgguf validate`.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 128, 2, 4, 2, 4096


class _Writer:
    """A GGUF writer that draws weights from one seed."""

    def __init__(self, path: Path, architecture: str, seed: int) -> None:
        self.file = gguf.GGUFWriter(path, architecture)
        self._draw = np.random.default_rng(seed)

    def weights(self, name: str, *shape: int) -> None:
        self.file.add_tensor(name, self._draw.normal(0, 0.05, shape).astype(np.float32))

    def ones(self, name: str, *shape: int) -> None:
        self.file.add_tensor(name, np.ones(shape, np.float32))

    def attention(self, at: str, kv_heads: int, out: str = "attn_output") -> None:
        """Attention and a gated FFN with their norms, under the prefix `at`."""
        kv = kv_heads * WIDTH // HEADS
        for name in ("attn_norm", "ffn_norm"):
            self.ones(f"{at}{name}.weight", WIDTH)
        for name, rows in (("attn_q", WIDTH), ("attn_k", kv), ("attn_v", kv), (out, WIDTH), ("ffn_gate", FFN)):
            self.weights(f"{at}{name}.weight", rows, WIDTH)
        self.weights(f"{at}ffn_up.weight", FFN, WIDTH)
        self.weights(f"{at}ffn_down.weight", WIDTH, FFN)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def build(path: Path, kind: str, *, pre: str = "llama-bpe", seed: int = 1) -> Path:
    """Writes the model `kind` (t5, mamba or bpe) to `path`; `pre`: bpe's `tokenizer.ggml.pre`."""
    writer = _Writer(path, "llama" if kind == "bpe" else kind, seed)
    size = _bpe_vocabulary(writer.file, pre) if kind == "bpe" else _byte_vocabulary(writer.file)
    file = writer.file
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_vocab_size(size)
    file.add_feed_forward_length(0 if kind == "mamba" else FFN)
    file.add_head_count(0 if kind == "mamba" else HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    writer.weights("token_embd.weight", size, WIDTH)
    {"bpe": _llama, "t5": _t5, "mamba": _mamba}[kind](writer)
    writer.close()
    return path


def _byte_vocabulary(file: gguf.GGUFWriter) -> int:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    file.add_tokenizer_model("llama")
    file.add_token_scores([0.0] * len(pieces))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_token_list(pieces)
    file.add_token_types(kinds)
    return len(pieces)


def _bpe_vocabulary(file: gguf.GGUFWriter, pre: str) -> int:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's bytes that stand for themselves
    others = len(set(range(256)) - set(plain))
    pieces = [*map(chr, plain), *(chr(256 + i) for i in range(others)), "th", "<|endoftext|>"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_merges(["t h"])
    file.add_eos_token_id(len(pieces) - 1)
    file.add_token_list(pieces)
    file.add_token_types([gguf.TokenType.NORMAL] * (len(pieces) - 1) + [gguf.TokenType.CONTROL])
    return len(pieces)


def _llama(writer: _Writer) -> None:
    writer.file.add_head_count_kv(KV_HEADS)
    writer.file.add_rope_dimension_count(WIDTH // HEADS)
    for layer in range(LAYERS):
        writer.attention(f"blk.{layer}.", KV_HEADS)
    writer.ones("output_norm.weight", WIDTH)


def _t5(writer: _Writer) -> None:
    file = writer.file
    file.add_relative_attn_buckets_count(32)
    file.add_decoder_start_token_id(0)
    file.add_head_count_kv(HEADS)
    file.add_key_length(WIDTH // HEADS)
    file.add_value_length(WIDTH // HEADS)
    for side in ("enc", "dec"):
        for layer in range(LAYERS):
            at = f"{side}.blk.{layer}."
            writer.attention(at, HEADS, "attn_o")
            if layer == 0:
                writer.weights(f"{at}attn_rel_b.weight", 32, HEADS)
            if side == "dec":
                writer.ones(f"{at}cross_attn_norm.weight", WIDTH)
                for part in "qkvo":
                    writer.weights(f"{at}cross_attn_{part}.weight", WIDTH, WIDTH)
        writer.ones(f"{side}.output_norm.weight", WIDTH)


def _mamba(writer: _Writer) -> None:
    inner, state, rank, kernel = 2 * WIDTH, 16, 4, 4
    writer.file.add_ssm_conv_kernel(kernel)
    writer.file.add_ssm_inner_size(inner)
    writer.file.add_ssm_state_size(state)
    writer.file.add_ssm_time_step_rank(rank)
    decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        writer.ones(f"{at}attn_norm.weight", WIDTH)
        writer.weights(f"{at}ssm_in.weight", 2 * inner, WIDTH)
        writer.weights(f"{at}ssm_conv1d.weight", inner, kernel)
        writer.weights(f"{at}ssm_conv1d.bias", inner)
        writer.weights(f"{at}ssm_x.weight", rank + 2 * state, inner)
        writer.weights(f"{at}ssm_dt.weight", inner, rank)
        writer.weights(f"{at}ssm_dt.bias", inner)
        writer.weights(f"{at}ssm_out.weight", WIDTH, inner)
        writer.ones(f"{at}ssm_d", inner)
        writer.file.add_tensor(f"{at}ssm_a", decay)
    writer.ones("output_norm.weight", WIDTH)
