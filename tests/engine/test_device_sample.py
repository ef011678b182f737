"""Candidates from a device give the tokens that all logits give, on the CPU's own graph and over a loopback RPC device.

And a draw depends on no thread count, batch shape or reused cache: on whole models, with the logits they really have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridgen_gguf.engine.device_sample import DeviceSample
from hybridgen_gguf.engine.handles import Context, Model
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.sample.sampler import DeviceCandidates, Draw, SampleOptions, Sampler, device_candidates
from hybridgen_gguf.settings import ContextSettings, ModelSettings, Placement

PROMPT = [1, 40, 50, 60, 70, 40, 50, 61, 9, 200]
WIDE = {"top_p": 1.0, "min_p": 0.0, "temperature": 3.0}  # random weights give peaked logits: spread them out


def opened(model: Model, threads: int = 1) -> Context:
    return Context(model, ContextSettings(n_ctx=128, n_batch=64, n_ubatch=64, threads=threads, threads_batch=threads))


def generate(context: Context, options: SampleOptions, count: int, device: DeviceSample | None = None) -> list[Draw]:
    """`count` draws after PROMPT; with `device`, from its candidates, or from all logits where those settle nothing."""
    sampler = Sampler(options, n_vocab=context.model.n_vocab, seed=11)
    draws: list[Draw] = []
    tokens = PROMPT
    for position in range(len(PROMPT), len(PROMPT) + count):
        for token in tokens:
            sampler.accept(token)
        context.decode(tokens)
        draw = None
        if device is None:
            draw = sampler.draw(context.logits(), position)
        else:
            draw = sampler.draw_candidates(DeviceCandidates(*device.read()), position)
            draw = draw or sampler.draw(device.fetch(), position)
        draws.append(draw)
        tokens = [draw.token]
    return draws


@pytest.fixture(scope="module", params=["cpu", "rpc", "gpu"])
def model(request: pytest.FixtureRequest, engine: Library, tiny: Path) -> Iterator[Model]:
    """A tiny model on the CPU, on a remote device, and on a GPU: output layer and all."""
    settings = ModelSettings()
    if request.param == "gpu":
        names = [
            device.name for device in engine.devices() if device.kind == "gpu" and not device.name.startswith("RPC")
        ]
        if not names:
            pytest.skip("this machine has no GPU that the engine can use")
        settings = ModelSettings(n_gpu_layers=99, placement=Placement(devices=(names[0],)))
    if request.param == "rpc":
        endpoint = request.getfixturevalue("rpc_device")
        if not any(device.name == "RPC0" for device in engine.devices()):
            engine.add_rpc(endpoint)
        settings = ModelSettings(n_gpu_layers=99, placement=Placement(devices=("RPC0",)))
    with Model(tiny, settings) as opened_model:
        yield opened_model


SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {**WIDE, "top_k": 100},
    {**WIDE, "top_k": 20, "repeat_penalty": 1.5, "dry_multiplier": 1.0},
    {**WIDE, "top_k": 30, "draws": 4, "logprobs": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_candidates_choose_what_all_logits_choose(engine: Library, model: Model, settings: dict[str, object]) -> None:
    options = SampleOptions(**settings)  # type: ignore[arg-type]
    wanted = device_candidates(options, model.n_vocab)
    assert wanted is not None
    with opened(model) as context:
        plain = generate(context, options, 16)
    with opened(model) as context:
        common = {"n_vocab": model.n_vocab, "count": wanted, "probabilities": bool(options.logprobs)}
        with DeviceSample(engine.llama, context.handle, **common) as device:  # type: ignore[arg-type]
            few = generate(context, options, 16, device)
            assert len(device.read()[0]) == wanted  # nothing else crossed
    assert [d.token for d in few] == [d.token for d in plain]
    assert [d.draws for d in few] == [d.draws for d in plain]
    for a, b in zip(few, plain, strict=True):
        assert [s.token for s in a.top] == [s.token for s in b.top]
        assert a.logprob == (b.logprob if b.logprob is None else pytest.approx(b.logprob, abs=1e-5))


def test_the_full_softmax_is_drawn_exactly_through_few_candidates(engine: Library, model: Model) -> None:
    options = SampleOptions(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0)
    with opened(model) as context:
        plain = generate(context, options, 24)
    with (
        opened(model) as context,
        DeviceSample(engine.llama, context.handle, n_vocab=model.n_vocab, count=60) as device,
    ):
        few = generate(context, options, 24, device)
    assert [d.token for d in few] == [d.token for d in plain]


def test_all_logits_can_still_be_fetched_and_come_back_after_closing(engine: Library, model: Model) -> None:
    with opened(model) as context:
        context.decode(PROMPT)
        plain = context.logits().copy()
    with opened(model) as context:
        with DeviceSample(engine.llama, context.handle, n_vocab=model.n_vocab, count=5) as device:
            context.decode(PROMPT)
            ids, logits, lse = device.read()
            assert device.fetch().tolist() == plain.tolist()
            assert lse is None
            assert sorted(ids.tolist()) == sorted(np.argsort(-plain, kind="stable")[:5].tolist())
            assert logits.tolist() == plain[ids].tolist()
        context.clear()
        context.decode(PROMPT)
        assert context.logits().tolist() == plain.tolist()


def test_threads_batch_shapes_and_a_reused_cache_change_no_token(engine: Library, tiny: Path) -> None:
    options = SampleOptions(top_k=0, top_p=1.0, min_p=0.0, temperature=1.5)
    with Model(tiny, ModelSettings()) as model:
        with opened(model) as context:
            reference = [d.token for d in generate(context, options, 16)]
            assert context.keep_prefix(4)
            context.decode(PROMPT[4:-1])  # the same prompt in two pieces, the first from the cache
            sampler = Sampler(options, n_vocab=model.n_vocab, seed=11)
            context.decode(PROMPT[-1:])
            assert sampler.draw(context.logits(), len(PROMPT)).token == reference[0]
        with opened(model, threads=2) as context:
            assert [d.token for d in generate(context, options, 16)] == reference
        with opened(model) as context:
            for token in PROMPT[:-1]:
                context.decode([token])
            context.decode(PROMPT[-1:])
            sampler = Sampler(options, n_vocab=model.n_vocab, seed=11)
            assert sampler.draw(context.logits(), len(PROMPT)).token == reference[0]
