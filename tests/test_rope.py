"""Rotary settings and overridden metadata: the logits of float64, one meaning however it is said, idle ones named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinygguf
from command_line import call, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from llama64 import Positions
from llama64 import logits as expected_logits
from numpy.typing import NDArray

import hybridgen_gguf
from hybridgen_gguf.cli.changes import overrides_of
from hybridgen_gguf.engine.handles import Context, Model
from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.settings import (
    ContextSettings,
    ModelSettings,
    Override,
    Rope,
    context_settings_of,
    model_settings_of,
)

Capture = pytest.CaptureFixture[str]
TOKENS = (1, *(3 + n * 7 % 256 for n in range(60)))
PLAIN = Positions()
CASES = [
    (Rope(), PLAIN),
    (Rope(freq_base=500.0), replace(PLAIN, base=500.0)),
    (Rope(freq_scale=0.25), replace(PLAIN, scale=0.25)),
    (Rope(scaling="none", freq_scale=0.25), PLAIN),
    (Rope(attn_factor=1.5), replace(PLAIN, attn=1.5)),
    (Rope(scaling="yarn", freq_scale=0.25), replace(PLAIN, scale=0.25, ext=1.0)),
    (Rope(scaling="yarn", freq_scale=0.25, orig_ctx=32), replace(PLAIN, scale=0.25, ext=1.0, orig_ctx=32)),
    (Rope(freq_scale=0.25, ext_factor=0.5), replace(PLAIN, scale=0.25, ext=0.5)),
    (
        Rope(scaling="yarn", freq_scale=0.25, beta_fast=8.0, beta_slow=2.0),
        replace(PLAIN, scale=0.25, ext=1.0, fast=8.0, slow=2.0),
    ),
]


def logits(path: Path, rope: Rope = Rope(), *overrides: Override) -> NDArray[np.float64]:  # noqa: B008  # frozen
    with (
        Model(path, ModelSettings(override_kv=overrides)) as model,
        Context(model, ContextSettings(256, 64, 64, "f32", "f32", "off", rope=rope)) as context,
    ):
        context.decode(TOKENS)
        return context.logits().astype(np.float64)


@pytest.mark.parametrize(("rope", "positions"), CASES, ids=lambda case: str(case)[:60])
def test_logits_are_those_of_float64(tiny: Path, rope: Rope, positions: Positions) -> None:
    found, right = logits(tiny, rope), expected_logits(tiny, TOKENS, positions)
    assert np.abs(found - right).max() < 2e-5 * np.abs(right).max()
    if positions != PLAIN:
        assert np.abs(right - expected_logits(tiny, TOKENS, PLAIN)).max() > 1e-3 * np.abs(right).max()


def test_an_override_is_the_value_in_the_file(tiny: Path, tmp_path: Path) -> None:
    changed = tinygguf.build(tmp_path / "changed.gguf", sets=["llama.rope.freq_base=f32:777"])
    by_override = logits(tiny, Rope(), Override("llama.rope.freq_base", 777.0))
    assert (by_override == logits(changed)).all() and (by_override == logits(tiny, Rope(freq_base=777.0))).all()


def test_an_override_of_the_norm(tiny: Path) -> None:
    found = logits(tiny, Rope(), Override("llama.attention.layer_norm_rms_epsilon", 0.5))
    right = expected_logits(tiny, TOKENS, PLAIN, eps=0.5)
    assert np.abs(found - right).max() < 2e-5 * np.abs(right).max()


def test_the_verb_and_python_open_the_same(tiny: Path, capsys: Capture) -> None:
    asked = ("--raw", "-p", "hello world", "-n", 2, "-c", 256, "--temp", 0, "--logprobs", 1, "--json")
    plain = call(capsys, "run", tiny, *asked).json
    half = call(capsys, "run", tiny, *asked, "--rope-scale", 8, "--rope-freq-base", 50).json
    same = call(capsys, "run", tiny, *asked, "--rope-freq-scale", 0.125, LLAMA_ARG_ROPE_FREQ_BASE="50").json
    rope = Rope(freq_base=50.0, freq_scale=0.125)
    with hybridgen_gguf.load(str(tiny), n_ctx=256, threads=1, threads_batch=1, rope=rope) as model:
        reply = model.generate("hello world", max_tokens=2, temperature=0, logprobs=1)
    assert half["logprobs"] == same["logprobs"] == reply.as_json()["logprobs"] != plain["logprobs"]
    assert half["plan"]["rope"] == {"freq_base": 50.0, "freq_scale": 0.125}


def test_overrides_change_what_is_planned_and_opened(tiny: Path, capsys: Capture) -> None:
    start = "tokenizer.ggml.add_bos_token=bool:false"
    asked = ("--raw", "-p", "hello", "-n", 1, "-c", 256, "--json")
    plain, without = (call(capsys, "run", tiny, *asked, *more).json for more in ((), ("--override-kv", start)))
    assert without["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] - 1
    longer = call(capsys, "plan", tiny, "--json", "--override-kv", f"llama.context_length=int:4096,{start}").json[
        "plan"
    ]
    assert longer["n_ctx"] == 4096 and call(capsys, "plan", tiny, "--json").json["plan"]["n_ctx"] < 4096
    args = call(capsys, "plan", tiny, "-c", 256, "--rope-scale", 2, "--override-kv", start, "--format", "args").out
    assert f"--override-kv {start}" in args and "--rope-freq-scale 0.5" in args


def test_a_longer_context_is_what_the_scale_is_for(tiny: Path, capsys: Capture) -> None:
    assert "was trained for" in call(capsys, "plan", tiny, "-c", 512).err
    assert "was trained for" not in call(capsys, "plan", tiny, "-c", 512, "--rope-scale", 4).err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--override-kv", "x"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "a=int:x"), "'x' is no int"),
        (("--override-kv", "a=bool:1"), "'1' is no bool"),
        (("--override-kv", "a=double:1"), "is not KEY=TYPE:VALUE"),
        (("--override-kv", "llama.context_length=float:9"), "is int in the file"),
        (("--override-kv", "llama.expert_used_count=str:9"), "with --override-kv, "),
        (("--override-kv", "llama.attention.causal=int:1"), "takes a value of type bool, not int"),
        (("--override-kv", f"{'k' * 200}=int:1"), "is too long"),
        (("--rope-scaling", "ntk"), "--rope-scaling ntk is not known"),
        (("--rope-scale", 0), "--rope-scale 0 is out of range"),
        (("--rope-freq-base", -1), "--rope-freq-base -1 is out of range"),
        (("--rope-freq-scale", "nan"), "--rope-freq-scale nan is out of range"),
        (("--yarn-orig-ctx", -3), "--yarn-orig-ctx -3 is out of range"),
        (("--rope-scale", 2, "--rope-freq-scale", 2), "were both given"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(tiny: Path, capsys: Capture, flags: tuple[Any, ...], words: str) -> None:
    refused(call(capsys, "run", tiny, "--raw", "-p", "hi", *flags), 2, words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--override-kv", "llama.nothing=int:1"), "--override-kv llama.nothing=int:1 has no effect"),
        (("--yarn-beta-fast", 16), "--yarn-beta-fast 16 has no effect"),
        (("--rope-scaling", "none", "--rope-scale", 2), "--rope-freq-scale 0.5 has no effect"),
        (("--rope-scaling", "yarn", "--yarn-attn-factor", 2), "--yarn-attn-factor 2 has no effect"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named(tiny: Path, capsys: Capture, flags: tuple[Any, ...], words: str) -> None:
    assert words in call(capsys, "plan", tiny, "-c", 256, *flags).err
    refused(call(capsys, "plan", tiny, "-c", 256, *flags, "--strict"), 2, words)


values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(st.text("abc._", min_size=1, max_size=20), values)
def test_what_is_told_can_be_said_again(key: str, value: float) -> None:
    override = Override(key, value)
    assert overrides_of([str(override)]) == (override,)
    stored = {"n_gpu_layers": 0, "placement": {}, "override_kv": [{"key": key, "value": value}]}
    assert model_settings_of(stored).override_kv == (override,)


@given(st.text(max_size=30))
def test_any_text_is_an_override_or_refused(text: str) -> None:
    try:
        overrides_of([text])
    except UsageError as error:
        assert "--override-kv" in error.what


def test_settings_survive_json() -> None:
    context = ContextSettings(256, rope=Rope(scaling="yarn", orig_ctx=5))
    stored = {"n_ctx": 256, "placement": {}, "rope": {"scaling": "yarn", "orig_ctx": 5}}
    assert context_settings_of(stored) == context
