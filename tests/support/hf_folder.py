"""Makes small Hugging Face folders: a two-layer llama with random weights and a byte-level BPE. No torch needed.

The vocabulary holds the 256 byte letters, three merges and two special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MADE_UP_SPLIT = r"[0-9]{1,2}|[a-z]+[0-9]?|[^a-z0-9]+"
MERGES = (("t", "h"), ("Ġ", "a"), ("3", "3"))
TOKENS = 256 + len(MERGES) + 2


def byte_letters() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE, in the usual order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


def tokenizer_json(split: str, added: Sequence[str] = ()) -> dict[str, Any]:
    """A byte-level BPE with three merges whose pre-tokenizer splits by the regex `split`."""
    pieces = [*byte_letters(), *("".join(pair) for pair in MERGES)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    special = [
        {"id": len(pieces) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, text in enumerate(added)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    regex = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [regex, byte_level]},
        "post_processor": None, "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [list(pair) for pair in MERGES],
        },
    }  # fmt: skip


def llama_tensors(rows: int, embd: int = 64, ff: int = 128, layers: int = 2, seed: int = 3) -> dict[str, np.ndarray]:
    """Random weights of a llama with 4 heads and 2 KV heads."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.05, shape).astype(np.float32)

    found = {"model.embed_tokens.weight": random(rows, embd), "model.norm.weight": np.ones(embd, np.float32)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}{norm}.weight"] = np.ones(embd, np.float32)
        shapes = {"q": (embd, embd), "k": (embd // 2, embd), "v": (embd // 2, embd), "o": (embd, embd)}
        for key, shape in shapes.items():
            found[f"{name}self_attn.{key}_proj.weight"] = random(*shape)
        for key, shape in {"gate": (ff, embd), "up": (ff, embd), "down": (embd, ff)}.items():
            found[f"{name}mlp.{key}_proj.weight"] = random(*shape)
    return found


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file of F32 tensors."""
    header: dict[str, Any] = {}
    offset = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()))


def write_folder(
    folder: Path, split: str = LLAMA3_SPLIT, rows: int = TOKENS, vocab_size: int | None = None, extra: int = 0
) -> Path:
    """A whole folder. `extra`: tokens in added_tokens.json beyond those of tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": vocab_size or rows, "tie_word_embeddings": True, "bos_token_id": TOKENS - 2,
        "eos_token_id": TOKENS - 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer_json(split, ("<s>", "</s>")))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings)
    if extra:
        write_json(folder / "added_tokens.json", {f"<|extra_{i}|>": TOKENS + i for i in range(extra)})
    write_safetensors(folder / "model.safetensors", llama_tensors(rows))
    return folder


def write_json(path: Path, content: Any) -> None:
    """`content` as UTF-8 JSON."""
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
