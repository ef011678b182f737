"""A prompt stopped half-way, then asked again, gives the text of a cold run: recurrent and attention models (A-06)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import pytest
import tinygguf

import hybridgen_gguf
from hybridgen_gguf import GenerateOptions, LanguageModel, Reply, SampleOptions

PROMPT = "abcdefghij" * 51 + "xyzw"  # two chunks of 512 tokens
OPTIONS = GenerateOptions(max_tokens=12, seed=1, sample=SampleOptions(temperature=1.0, logprobs=1))


def stopped_after(calls: int, progress_at: int) -> tuple[Callable[[], bool], Callable[[int, int], None]]:
    """A `cancelled` that becomes true `calls` questions after progress reached `progress_at`, and that progress."""
    seen = {"from": False, "calls": 0}

    def cancelled() -> bool:
        seen["calls"] += seen["from"]
        return seen["calls"] > calls

    def progress(done: int, _total: int) -> None:
        seen["from"] = done >= progress_at

    return cancelled, progress


def numbers(reply: Reply) -> list[tuple[int, float]]:
    return [(draw.token, round(draw.logprob or 0.0, 4)) for draw in reply.logprobs]


def cold(path: Path) -> Reply:
    with hybridgen_gguf.load(str(path), n_ctx=1024, threads=1) as model:
        return model.generate(PROMPT, OPTIONS)


def stop_and_ask_again(model: LanguageModel, calls: int, progress_at: int) -> Reply:
    cancelled, progress = stopped_after(calls, progress_at)
    list(model.run(model.encode(PROMPT), OPTIONS, cancelled=cancelled, progress=progress))
    return model.generate(PROMPT, OPTIONS)


@pytest.mark.parametrize("kind", ["mamba", "llama"])
def test_stopped_in_the_second_chunk(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    architectures.build(path, "mamba") if kind == "mamba" else tinygguf.build(path, ctx=1024)
    wanted = numbers(cold(path))
    with hybridgen_gguf.load(str(path), n_ctx=1024, threads=1) as model:
        for calls in (2, 5, 9, 14, 20, 27, 35):
            model.opened.context.clear()
            model._decoder.tokens.clear()
            reply = stop_and_ask_again(model, calls, 512)
            assert numbers(reply) == wanted, calls


def test_stopped_in_the_first_chunk(tmp_path: Path) -> None:
    path = architectures.build(tmp_path / "m.gguf", "mamba")
    wanted = numbers(cold(path))
    with hybridgen_gguf.load(str(path), n_ctx=1024, threads=1) as model:
        for calls in (1, 7, 30):
            model.opened.context.clear()
            model._decoder.tokens.clear()
            assert numbers(stop_and_ask_again(model, calls, 0)) == wanted


def test_a_changed_prompt_reuses_nothing_of_a_recurrent_state(tmp_path: Path) -> None:
    path = architectures.build(tmp_path / "m.gguf", "mamba")
    with hybridgen_gguf.load(str(path), n_ctx=1024, threads=1) as model:
        model.generate(PROMPT, OPTIONS)
        reply = model.generate(PROMPT[:300], OPTIONS)
        assert reply.usage.reused_tokens == 0
    with hybridgen_gguf.load(str(path), n_ctx=1024, threads=1) as model:
        assert numbers(model.generate(PROMPT[:300], OPTIONS)) == numbers(reply)
