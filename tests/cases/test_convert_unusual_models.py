"""Whole conversions with the pinned converter. They need the `convert` extra (torch, transformers); each takes 10 s.

Cases D-08 to D-10.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from pathlib import Path

import gguf
import pytest
from hf_folder import LLAMA3_SPLIT, MADE_UP_SPLIT, TOKENS, llama_tensors, write_folder, write_json

from hybridgen_gguf.errors import Failed
from hybridgen_gguf.make.convert import ConvertOptions, convert
from hybridgen_gguf.make.job import run_job
from hybridgen_gguf.make.pipeline import MakeOptions, make
from hybridgen_gguf.make.quantize import QuantizeOptions
from hybridgen_gguf.model_file.header import read_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="the converter needs torch and transformers (extra `convert`)"
    ),
]


def test_d08_override_is_used_and_compared_and_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "模型", LLAMA3_SPLIT)
    done = convert(ConvertOptions(folder, tmp_path / "o.gguf", "f32", pre_tokenizer="llama-bpe"))
    header = read_header(tmp_path / "o.gguf")
    assert header.metadata["tokenizer.ggml.pre"] == done.pre_tokenizer == "llama-bpe"
    assert done.tokens.compared > 200
    assert done.tokens.equal
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "o.gguf").tensors}
    wanted = llama_tensors(TOKENS)
    assert (tensors["token_embd.weight"].data == wanted["model.embed_tokens.weight"]).all()
    assert (tensors["blk.1.ffn_down.weight"].data == wanted["model.layers.1.mlp.down_proj.weight"]).all()
    again = convert(ConvertOptions(folder, tmp_path / "p.gguf", "f32", pre_tokenizer="llama-bpe"))
    assert again.sha256 == done.sha256
    names = ["o.gguf", "o.gguf.json", "p.gguf", "p.gguf.json", "模型"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_d08_d09_wrong_override_is_told_and_padded_rows_load(tmp_path: Path) -> None:
    # config.json still says TOKENS: the embedding decides. GPT-2 keeps "3333" whole, this folder cuts after two digits.
    folder = write_folder(tmp_path / "hf", r"\p{N}|[^\p{N}]+", rows=TOKENS + 61, vocab_size=TOKENS)
    done = convert(ConvertOptions(folder, tmp_path / "o.gguf", pre_tokenizer="gpt-2"))
    assert not done.tokens.equal
    assert "splits text differently" in done.warnings[-1]
    tokens = gguf.GGUFReader(tmp_path / "o.gguf").get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == TOKENS + 61
    assert tokens[-1] == f"[PAD{TOKENS + 60}]"
    job = {"model": str(tmp_path / "o.gguf"), "texts": ["33"], "with_context": True}
    assert run_job("tokenize", job)["tokens"] == [[258]]


def test_d08_unknown_pre_tokenizer_from_a_folder_straight_to_a_quantized_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", MADE_UP_SPLIT)
    with pytest.raises(Failed) as caught:
        make(MakeOptions(QuantizeOptions(folder, tmp_path / "o.gguf", "Q8_0")), lambda *_: None)
    assert "does not know: hash " in caught.value.what
    assert MADE_UP_SPLIT[:12] in caught.value.what
    assert "--pre-tokenizer" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_d10_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    folder, marker = write_folder(tmp_path / "evil"), tmp_path / "PWN"
    (folder / "tok.py").write_text(f"open({str(marker)!r}, 'w')\nclass Tok:\n    pass\n", encoding="utf-8")
    for name in ("tokenizer_config.json", "config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        content |= {"auto_map": {"AutoTokenizer": ["tok.Tok", "tok.Tok"], "AutoConfig": "tok.Tok"}}
        content.pop("tokenizer_class", None)
        write_json(folder / name, content)
    try:
        done = convert(ConvertOptions(folder, tmp_path / "o.gguf", pre_tokenizer="llama-bpe"))
        assert any("it was not run" in warning for warning in done.warnings)
    except Failed as error:
        assert "code of its own" in error.what
    assert not marker.exists()


def test_d10_a_pickle_that_runs_code_is_refused_even_when_allowed(tmp_path: Path) -> None:
    folder, marker = write_folder(tmp_path / "evil"), tmp_path / "PWN"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {marker}",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(Failed):
        convert(ConvertOptions(folder, tmp_path / "o.gguf", pre_tokenizer="llama-bpe", allow_pickle=True))
    assert [p.name for p in tmp_path.iterdir()] == ["evil"]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a08_every_end_token_of_a_list_ends_or_is_named(tmp_path: Path, file: str) -> None:
    folder = write_folder(tmp_path / "hf", extra=3, rows=TOKENS + 3)
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    eos = TOKENS - 1
    write_json(folder / file, content | {"eos_token_id": [eos, TOKENS, TOKENS + 1, TOKENS + 2, eos]})
    done = convert(ConvertOptions(folder, tmp_path / "o.gguf", "f32", pre_tokenizer="llama-bpe"))
    named = [line for line in done.warnings if "will not end answers" in line]
    assert len(named) == 1
    assert f"{TOKENS + 2} '<|extra_2|>'" in named[0] and f"{TOKENS + 1} " not in named[0]
    job = {
        "model": str(tmp_path / "o.gguf"),
        "texts": [],
        "with_context": False,
        "ends": [*range(TOKENS - 2, TOKENS + 3)],
    }
    assert run_job("tokenize", job)["not_ends"] == [TOKENS - 2, TOKENS + 2]
    metadata = read_header(tmp_path / "o.gguf").metadata
    keys = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert keys == [eos, TOKENS, TOKENS + 1]
