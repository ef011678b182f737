"""shape.py: what a model holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.errors import BadFile, NotFound
from hybridgen_gguf.model_file.shape import read_shape


def test_tiny(tmp_path: Path) -> None:
    shape = read_shape(tinygguf.build(tmp_path / "t.gguf", template="{{ messages }}"))
    assert (shape.architecture, shape.name, shape.n_layers, shape.n_embd, shape.n_ff) == ("llama", "tiny", 2, 64, 128)
    assert (shape.n_ctx_train, shape.n_vocab, shape.tokenizer, shape.chat_template) == (
        128,
        259,
        "llama",
        "{{ messages }}",
    )
    assert (shape.n_head, shape.n_head_kv, shape.layers[0].head_k) == ((4, 4), (2, 2), 16)
    assert (shape.add_bos, shape.add_eos, shape.bos_id, shape.eos_id) == (None, None, 1, 2)
    assert shape.tied_output and shape.file_type == "" and shape.window == 0
    assert [(share.type, share.tensors) for share in shape.mix] == [("F32", 20)]
    assert shape.bits_per_weight == 32 and shape.parameters_active == shape.parameters


def test_groups_add_up_and_name_their_layers(tmp_path: Path) -> None:
    shape = read_shape(tinygguf.build(tmp_path / "t.gguf", tied=False))
    assert not shape.tied_output
    assert sum(group.bytes for group in shape.groups) == shape.bytes_weights == sum(t.bytes for t in shape.file.tensors)
    assert sum(group.tensors for group in shape.groups) == len(shape.file.tensors)
    assert {(g.layer, g.kind): g.tensors for g in shape.groups} == {
        (None, "embedding"): 1,
        (None, "output"): 1,
        (None, "norm"): 1,
        (0, "norm"): 2,
        (0, "attention"): 4,
        (0, "ffn"): 3,
        (1, "norm"): 2,
        (1, "attention"): 4,
        (1, "ffn"): 3,
    }
    assert next(g.name for g in shape.groups if g.layer == 1 and g.kind == "ffn") == "blk.1.ffn"


def test_experts(tmp_path: Path) -> None:
    shapes = {
        "token_embd.weight": [64, 8],
        "blk.0.attn_q.weight": [64, 64],
        "blk.0.attn_q_norm.weight": [64],
        "blk.0.ffn_gate_inp.weight": [64, 8],
        "blk.0.ffn_up_exps.weight": [64, 32, 8],
        "blk.0.ffn_up_shexp.weight": [64, 32],
        "blk.0.exp_probs_b.bias": [8],
        "blk.0.ssm_in.weight": [64, 4],
        "blk.0.something.weight": [64],
        "rope_freqs.weight": [32],
    }
    entries, data = raw.tensors(shapes)
    keys = raw.model_keys("qwen3moe", block_count=1, expert_count=8, expert_used_count=2)
    shape = read_shape(raw.write(tmp_path, raw.gguf_bytes(keys, entries, data)))
    kinds = {group.kind: group.parameters for group in shape.groups if group.layer == 0}
    assert kinds == {"attention": 64 * 68, "norm": 64, "ffn": 64 * 8 + 64 * 32 + 8, "experts": 64 * 32 * 8, "other": 64}
    assert shape.parameters_active == shape.parameters - 64 * 32 * 6
    assert (shape.n_expert, shape.n_expert_used) == (8, 2)
    assert shape.n_vocab == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([raw.key("general.type", "str", "adapter")], "adapter"),
        ([raw.key("general.type", "str", "imatrix")], "importance matrix"),
        ([raw.key("general.type", "str", "mmproj")], "projector"),
        ([raw.key("general.name", "u32", 3)], r"'general\.name' must be text"),
        ([raw.array("tokenizer.chat_template", "str", ["x"])], r"'tokenizer\.chat_template' must be text"),
    ],
)
def test_what_is_no_language_model(tmp_path: Path, keys: list[bytes], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        read_shape(raw.write(tmp_path, raw.gguf_bytes(raw.model_keys("llama") + keys)))


def test_projector_by_architecture(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="projector"):
        read_shape(raw.write(tmp_path, raw.gguf_bytes(raw.model_keys("clip"))))


def test_missing_file() -> None:
    with pytest.raises(NotFound):
        read_shape("does-not-exist.gguf")


@pytest.mark.real
def test_smollm2(smollm2: Path) -> None:
    shape = read_shape(smollm2)
    assert (shape.n_layers, shape.n_embd, shape.n_ctx_train, shape.n_vocab) == (30, 576, 8192, 49152)
    assert (shape.file_type, shape.parameters, shape.add_bos) == ("Q4_1", 134_515_008, False)
    assert shape.chat_template is not None and shape.tied_output
