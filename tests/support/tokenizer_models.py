"""Tiny files with a vocabulary and no weights, for every kind of tokenizer that the engine knows; and a window on them.

A byte-level BPE holds the bytes both ways (as GPT-2's letters and as <0xXX>), so that each pre-tokenizer can use it.
Runs of a letter, a space or a sign merge, in steps of two, up to 16. Invariant: every byte can be tokenized.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# The values of tokenizer.ggml.model; "gpt2" takes a pre-tokenizer.
MODELS = ("llama", "gpt2", "gemma4", "whitespace", "hybriddna", "bert", "t5", "rwkv", "plamo2", "test", "no_vocab")
CHAT = ("<|im_start|>", "<|im_end|>")
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(500))
_RUNS = "AaĠ▁Ċ\n0!<"  # what merges with itself
_BYTES = [f"<0x{i:02X}>" for i in range(256)]
_T = gguf.TokenType
Piece = tuple[str, gguf.TokenType, float]


def _letters() -> list[str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def _runs(signs: str) -> list[str]:
    return [sign * size for sign in signs for size in (2, 4, 8, 16)]


def _specials() -> list[Piece]:
    control = [(text, _T.CONTROL, 0.0) for text in (*CHAT, *RESERVED, "l><t", "<mask>", "<|endoftext|>")]
    own = ("<tool>", "<tool>x", "    ", "xx", "xxx")  # one begins like another, and they overlap
    return [*control, *((text, _T.USER_DEFINED, 0.0) for text in own)]


def _normal(texts: Sequence[str]) -> list[Piece]:
    return [(text, _T.NORMAL, -float(i + 1)) for i, text in enumerate(dict.fromkeys(texts))]


def _pieces(model: str) -> list[Piece]:
    fixed = [("<unk>", _T.UNKNOWN, 0.0), ("<s>", _T.CONTROL, 0.0), ("</s>", _T.CONTROL, 0.0)]
    by_byte = [(text, _T.BYTE, 0.0) for text in _BYTES]
    words = [*_runs("Aa▁0!"), *"Aa▁0!e漢", "▁th", "th"]
    if model == "bert":
        unused = [(f"[unused{i}]", _T.CONTROL, 0.0) for i in range(104)]
        unused[100:103] = [("[UNK]", _T.UNKNOWN, 0.0), ("[CLS]", _T.CONTROL, 0.0), ("[SEP]", _T.CONTROL, 0.0)]
        return [*unused, *_normal(words), *_specials()]
    if model == "t5":
        first = [("<pad>", _T.CONTROL, 0.0), ("</s>", _T.CONTROL, 0.0), ("<unk>", _T.UNKNOWN, 0.0)]
        return [*first, *_normal(words), *_specials()]
    if model == "rwkv":
        return [*_normal([f"\\x{i:02x}" for i in range(256)] + _runs("Aa0!")), *_specials()]
    if model in ("llama", "plamo2"):
        return [*fixed, ("<pad>", _T.CONTROL, 0.0), *by_byte, *_normal(words), *_specials()]
    dna = ["<dna>", "</dna>", "<oov>", "ACGTAC\ue000"] if model == "hybriddna" else []
    return [*fixed, *by_byte, *_normal([*_letters(), *_runs(_RUNS), "th", *dna]), *_specials()]


def write(
    out: Path, model: str, pre: str = "", *, name: str = "tiny", pieces: Sequence[Piece] = (), weights: bool = False
) -> Path:
    """Writes a file with the tokenizer `model` and the pre-tokenizer `pre`.

    `name`: of "phi-3" the special tokens drop spaces after them. `pieces`: another vocabulary. `weights`: random ones,
    so that the file generates.
    """
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(name)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    if model == "no_vocab":
        writer.add_vocab_size(8)
    else:
        pieces = pieces or _pieces(model)
        writer.add_token_list([text for text, _, _ in pieces])
        writer.add_token_types([kind for _, kind, _ in pieces])
        writer.add_token_scores([score for _, _, score in pieces])
    if model in ("gpt2", "gemma4", "whitespace", "hybriddna"):
        halves = [(run[: len(run) // 2]) for run in _runs(_RUNS)]
        writer.add_token_merges([f"{half} {half}" for half in halves] + ["t h"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    if weights:
        _add_weights(writer, len(pieces))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_weights(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    rng = np.random.default_rng(1)
    shapes = {"token_embd": (n_vocab, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {f"blk.0.{part}": (64, 64) for part in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{part}": (64, 64) for part in ("ffn_gate", "ffn_up", "ffn_down")}
    for part, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.05, shape)
        writer.add_tensor(f"{part}.weight", values.astype(np.float32))


class Tokenizer:
    """`llama_tokenize` of an open file. `api`: that of the engine (Library.api)."""

    def __init__(self, api: Any, path: Path) -> None:
        self._api = api
        settings = api.llama_model_default_params()
        settings.vocab_only = True
        self._model = api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise OSError(f"the engine does not open {path}")
        self._vocab = api.llama_model_get_vocab(self._model)

    def ids(self, text: bytes, parse_special: bool = True) -> list[int] | None:
        """Token ids without start and end; None: the engine refused."""
        room = len(text) + 8
        while True:
            out = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(self._vocab, text, len(text), out, room, False, parse_special)
            if count >= 0:
                return out[:count]
            if count == -(2**31):
                return None
            room = -count

    def close(self) -> None:
        self._api.llama_model_free(self._model)


@contextmanager
def opened(api: Any, path: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(api, path)
    try:
        yield tokenizer
    finally:
        tokenizer.close()
