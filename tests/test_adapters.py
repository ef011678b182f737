"""Adapters (LoRA): logits as of weights with the product added; told in the plan; what does not fit is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from adapters import RANK, factors, merged, write_adapter
from command_line import call, refused
from numpy.typing import NDArray

import hybridgen_gguf
from hybridgen_gguf.engine.handles import Context, Model
from hybridgen_gguf.errors import BadFile
from hybridgen_gguf.model_file.adapter import adapter_pairs, check_adapter
from hybridgen_gguf.model_file.split import open_model_file
from hybridgen_gguf.settings import Adapter, ContextSettings, ModelSettings

Capture = pytest.CaptureFixture[str]
NAMES = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight", "blk.0.attn_output.weight")
TEXT = (1, 60, 80, 100, 120)
ALPHA = 8.0


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "风格.gguf", factors(tiny, NAMES), alpha=ALPHA)


def logits(path: Path, *adapters: Adapter) -> NDArray[np.float64]:
    with (
        Model(path, ModelSettings(adapters=adapters)) as model,
        Context(model, ContextSettings(256, n_batch=64, n_ubatch=64)) as context,
    ):
        context.decode(TEXT)
        return context.logits().astype(np.float64)


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0])
def test_an_adapter_is_the_product_added_to_the_weights(
    tiny: Path, tmp_path: Path, adapter: Path, scale: float
) -> None:
    whole = merged(tiny, tmp_path / "merged.gguf", factors(tiny, NAMES), scale * ALPHA / RANK)
    plain, with_adapter, expected = logits(tiny), logits(tiny, Adapter(str(adapter), scale)), logits(whole)
    spread = expected.std()
    assert np.abs(with_adapter - expected).max() < 2e-3 * spread  # F16 rows of the KV cache round otherwise
    assert np.abs(plain - expected).max() > 0.1 * spread


def test_a_scale_of_zero_is_no_adapter(tiny: Path, adapter: Path) -> None:
    assert (logits(tiny, Adapter(str(adapter), 0.0)) == logits(tiny)).all()


def test_two_adapters_add_up(tiny: Path, tmp_path: Path, adapter: Path) -> None:
    other = write_adapter(tmp_path / "other.gguf", factors(tiny, NAMES[:1], seed=2), alpha=0.0)  # 0: scale alone
    both = logits(tiny, Adapter(str(adapter)), Adapter(str(other), 0.5))
    first = merged(tiny, tmp_path / "first.gguf", factors(tiny, NAMES), ALPHA / RANK)
    expected = logits(merged(first, tmp_path / "both.gguf", factors(tiny, NAMES[:1], seed=2), 0.5))
    assert np.abs(both - expected).max() < 2e-3 * expected.std()


def test_the_verb_and_python_take_it(tiny: Path, adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(adapter, tmp_path / "a,b.gguf")  # a comma in a name stays
    asked = ("--raw", "-p", "hello", "-n", 8, "-c", 256, "--temp", 0, "--json")
    plain = call(capsys, "run", tiny, *asked).json
    once = call(capsys, "run", tiny, *asked, "--lora", tmp_path / "a,b.gguf").json
    scaled = call(capsys, "run", tiny, *asked, "--lora-scaled", f"{adapter}:0.0").json
    short = call(capsys, "run", tiny, *asked, "--lora", f"{adapter}:1").json
    with hybridgen_gguf.load(str(tiny), n_ctx=256, threads=1, threads_batch=1, adapters=[str(adapter)]) as model:
        reply = model.generate("hello", max_tokens=8, temperature=0)
    assert plain["tokens"] == scaled["tokens"] != once["tokens"] == short["tokens"] == list(reply.tokens)
    assert [a["scale"] for a in scaled["plan"]["adapters"]] == [0.0] and "adapters" not in plain["plan"]


def test_its_bytes_are_in_the_plan(tiny: Path, adapter: Path, capsys: Capture) -> None:
    plain = call(capsys, "plan", tiny, "-c", 256, "--json").json["plan"]
    more = call(capsys, "plan", tiny, "-c", 256, "--json", "--lora", adapter).json["plan"]
    assert more["placement"][0]["weights"] - plain["placement"][0]["weights"] == sum(
        adapter_pairs(str(adapter)).values()
    )
    flags = call(capsys, "plan", tiny, "-c", 256, "--lora-scaled", f"{adapter}:0.5", "--format", "args").out
    assert f"--lora-scaled '{adapter}:0.5'" in flags or f"--lora-scaled {adapter}:0.5" in flags


def test_what_does_not_fit_is_named(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    model, pairs = open_model_file(tiny), factors(tiny, NAMES)
    a, b = pairs[NAMES[0]]
    cases = {
        "architecture qwen2, and the model is llama": {"architecture": "qwen2"},
        "is not an adapter": {"sets": {"general.type": "model"}},
        "of type other": {"sets": {"adapter.type": "other"}},
        "half a pair": {"drop": f"{NAMES[0]}.lora_b"},
        "does not have": {"pairs": {"blk.7.attn_q.weight": (a, b)}},
        "does not fit this model": {"pairs": {NAMES[0]: (a[:, :-1].copy(), b)}},
        "ranks 4 and 3": {"pairs": {NAMES[0]: (a, b[:, :-1].copy())}},
        "no part of a LoRA": {"pairs": {"strange": (a, b)}, "drop": "strange.lora_a"},
    }
    for words, changes in cases.items():
        path = write_adapter(tmp_path / "bad.gguf", **{"pairs": pairs, **changes})  # type: ignore[arg-type]
        if words == "no part of a LoRA":
            path.write_bytes(path.read_bytes().replace(b"strange.lora_b", b"strange.lora_c"))
        with pytest.raises(BadFile, match=words):
            check_adapter(str(path), model)
        refused(call(capsys, "run", tiny, "--raw", "-p", "hi", "--lora", path), 1, words)
    refused(call(capsys, "run", tiny, "--raw", "-p", "hi", "--lora", tmp_path / "no.gguf"), 4, "no.gguf")
    refused(call(capsys, "run", tiny, "--raw", "-p", "hi", "--lora-scaled", "x"), 2, "is not FILE:SCALE")
    refused(call(capsys, "run", tiny, "--raw", "-p", "hi", "--lora", tiny), 1, "is not an adapter")


def test_a_cut_adapter_is_refused(tiny: Path, adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(adapter.read_bytes()[:-100])
    refused(call(capsys, "run", tiny, "--raw", "-p", "hi", "--lora", cut), 1, "cut.gguf")


def test_on_a_device(tiny: Path, adapter: Path, rpc_device: str) -> None:
    """The pairs lie where their weights do."""
    with hybridgen_gguf.load(
        str(tiny), rpc=[rpc_device], n_ctx=256, n_gpu_layers=-1, threads=1, threads_batch=1, adapters=[str(adapter)]
    ) as model:
        use = {entry.device: entry.weights for entry in model.opened.memory()}
        planned = {entry.device: entry.weights for entry in model.plan.memory}
    assert use == planned
