"""Makes a tiny GGUF model with random weights that loads and generates nonsense (needs numpy and gguf).

    python tests/tinygguf.py OUT.gguf [--embd 64] [--ff 128] [--layers 2] [--ctx 128] [--heads 4] [--kv 2]
                             [--seed 1] [--type f32|f16] [--set key=type:value ...] [--drop key-or-tensor ...]
                             [--token INDEX=TEXT ...] [--extra TEXT ...] [--untied] [--template JINJA] [--experts N]

A llama with a 259-piece SentencePiece-style byte vocabulary (<unk> <s> </s> and 256 byte pieces), 0.37 MB. Every byte
is its own token, so its output is full of half UTF-8 characters.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

KINDS = ("str", "u32", "i32", "u64", "f32", "bool")


def build(
    out: str | Path,
    embd: int = 64,
    ff: int = 128,
    layers: int = 2,
    ctx: int = 128,
    seed: int = 1,
    heads: int = 4,
    kv: int = 2,
    wtype: str = "f32",
    sets: Sequence[str] = (),
    drops: Sequence[str] = (),
    tokens: Mapping[int, str] | None = None,
    template: str | None = None,
    extra: Sequence[str] = (),
    tied: bool = True,
    split: int = 0,
    experts: int = 0,
) -> Path:
    """Writes the model to `out` (`split`: at most that many tensors a part); returns the path of the first file.

    `experts`: so many in each FFN, of which two work on a token; 0: a dense model.
    """
    out = Path(out)
    writer = gguf.GGUFWriter(None if split else out, "llama", split_max_tensors=split)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *extra]
    for index, text in (tokens or {}).items():
        pieces[index] = text
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(extra)]
    values: dict[str, tuple[str, object]] = {
        "general.name": ("str", "tiny"),
        "llama.context_length": ("u32", ctx),
        "llama.embedding_length": ("u32", embd),
        "llama.block_count": ("u32", layers),
        "llama.feed_forward_length": ("u32", ff),
        "llama.attention.head_count": ("u32", heads),
        "llama.attention.head_count_kv": ("u32", kv),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "llama.rope.dimension_count": ("u32", embd // heads),
        "llama.vocab_size": ("u32", len(pieces)),
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
        "tokenizer.ggml.unknown_token_id": ("u32", 0),
    }
    if experts:
        values |= {"llama.expert_count": ("u32", experts), "llama.expert_used_count": ("u32", 2)}
    for text in sets:
        key, rest = text.split("=", 1)
        values[key] = tuple(rest.split(":", 1))  # type: ignore[assignment]
    for key, (name, value) in values.items():
        if key not in drops:
            _add(writer, key, name, value)
    if "tokenizer.ggml.tokens" not in drops:
        writer.add_token_list(pieces)
    if "tokenizer.ggml.scores" not in drops:
        writer.add_token_scores([0.0] * len(pieces))
    if "tokenizer.ggml.token_type" not in drops:
        writer.add_token_types(types)
    if template:
        writer.add_chat_template(template)
    _add_tensors(writer, len(pieces), embd, ff, layers, heads, kv, seed, wtype, tied, drops, experts)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out if not split else sorted(out.parent.glob(f"{out.stem}-00001-of-*.gguf"))[0]


def _add(writer: gguf.GGUFWriter, key: str, kind: str, value: object) -> None:
    add = {"str": writer.add_string, "u32": writer.add_uint32, "i32": writer.add_int32, "u64": writer.add_uint64}
    if kind == "bool":
        writer.add_bool(key, str(value).lower() in ("1", "true"))
    elif kind == "f32":
        writer.add_float32(key, float(str(value)))
    else:
        add[kind](key, value if kind == "str" else int(str(value)))


def _add_tensors(
    writer: gguf.GGUFWriter,
    n_vocab: int,
    embd: int,
    ff: int,
    layers: int,
    heads: int,
    kv: int,
    seed: int,
    wtype: str,
    tied: bool,
    drops: Sequence[str],
    experts: int,
) -> None:
    rng = np.random.default_rng(seed)
    dtype, head = np.float32 if wtype == "f32" else np.float16, embd // heads

    def add(name: str, *shape: int, ones: bool = False) -> None:
        if name not in drops:
            values = np.ones(shape, np.float32) if ones else rng.normal(0, 0.05, shape).astype(dtype)
            writer.add_tensor(name, values)

    add("token_embd.weight", n_vocab, embd)
    for layer in range(layers):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", embd, ones=True)
        add(at + "ffn_norm.weight", embd, ones=True)
        add(at + "attn_q.weight", heads * head, embd)
        add(at + "attn_k.weight", kv * head, embd)
        add(at + "attn_v.weight", kv * head, embd)
        add(at + "attn_output.weight", embd, heads * head)
        many, suffix = ((experts,), "_exps") if experts else ((), "")
        if experts:
            add(at + "ffn_gate_inp.weight", experts, embd)
        add(at + f"ffn_gate{suffix}.weight", *many, ff, embd)
        add(at + f"ffn_up{suffix}.weight", *many, ff, embd)
        add(at + f"ffn_down{suffix}.weight", *many, embd, ff)
    add("output_norm.weight", embd, ones=True)
    if not tied:
        add("output.weight", n_vocab, embd)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    for name, default in (("embd", 64), ("ff", 128), ("layers", 2), ("ctx", 128), ("seed", 1), ("heads", 4), ("kv", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--type", default="f32", dest="wtype")
    for name in ("set", "drop"):
        parser.add_argument(f"--{name}", action="append", default=[], dest=f"{name}s")
    parser.add_argument("--token", action="append", default=[])
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--untied", action="store_false", dest="tied")
    parser.add_argument("--template")
    for name in ("split", "experts"):
        parser.add_argument(f"--{name}", type=int, default=0)
    given = vars(parser.parse_args())
    tokens = {int(text.split("=", 1)[0]): text.split("=", 1)[1] for text in given.pop("token")}
    build(tokens=tokens, **given)


if __name__ == "__main__":
    _main()
