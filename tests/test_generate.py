"""The loop on a model in memory: finish reasons, stops, seeds, reuse, cancellation, JSON keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridgen_gguf.adapt.threads import Governor
from hybridgen_gguf.engine.fake import FakeContext, FakeModel
from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.generate import Chunk, LanguageModel, Reply
from hybridgen_gguf.plan import KvPlan, Plan
from hybridgen_gguf.prompt.encode import Message
from hybridgen_gguf.request import GenerateOptions, merged
from hybridgen_gguf.settings import ContextSettings, ModelSettings

PLAN = Plan(
    ModelSettings(), ContextSettings(256, n_batch=64, n_ubatch=64), n_layers=1, kv=KvPlan(0, 256, 0),
)  # fmt: skip


class Watcher(Governor):
    """Counts its calls instead of looking at the machine."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def rest(self) -> None:
        self.seen.append("rest")

    def tick(self) -> None:
        self.seen.append("tick")

    def on_token(self, seconds: float) -> None:
        assert seconds > 0
        self.seen.append("token")


def model_that_writes(
    text: bytes, n_ctx: int = 256, governor: Governor | None = None
) -> tuple[LanguageModel, FakeContext]:
    context, model = FakeContext(text, n_ctx), FakeModel()
    opened: Any = SimpleNamespace(
        plan=PLAN, model=model, context=context, vocabulary=model, load_s=0.5, close=lambda: None,
        device_sample=lambda count, probabilities: None, shape=SimpleNamespace(chat_template=None),
    )  # fmt: skip
    return LanguageModel(opened, governor=governor), context


def test_text_ends_with_the_models_end_token() -> None:
    model, _ = model_that_writes("Grüße 漢字".encode())
    reply = model.generate("hi", temperature=0)
    assert (reply.text, reply.finish_reason) == ("Grüße 漢字", "stop")
    assert reply.usage.prompt_tokens == 3 and reply.usage.completion_tokens == len("Grüße 漢字".encode())


def test_chunks_joined_are_the_text_and_only_the_last_has_the_reply() -> None:
    model, _ = model_that_writes("a 漢 b".encode())
    chunks = list(model.stream("hi", temperature=0))
    assert "".join(chunk.text for chunk in chunks) == cast(Reply, chunks[-1].reply).text == "a 漢 b"
    assert all(chunk.reply is None for chunk in chunks[:-1])


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_token_limit(limit: int) -> None:
    model, _ = model_that_writes(b"abcdef")
    reply = model.generate("hi", temperature=0, max_tokens=limit)
    assert (reply.text, reply.finish_reason, len(reply.tokens)) == ("abcdef"[:limit], "length", limit)


def test_full_context_ends_with_length() -> None:
    model, _ = model_that_writes(b"x" * 500, n_ctx=16)
    reply = model.generate("hi", temperature=0)
    assert reply.finish_reason == "length" and len(reply.tokens) == 16 - 3 + 1


def test_stop_string_over_tokens_and_one_completed_by_the_end() -> None:
    model, _ = model_that_writes(b"one two three")
    assert model.generate("hi", temperature=0, stop=["o th", "zzz"]).text == "one tw"
    late = model.generate("hi", temperature=0, stop=["three four", "hree"])
    assert (late.text, late.finish_reason) == ("one two t", "stop")


def test_seed_is_reported_and_zero_is_a_seed() -> None:
    model, _ = model_that_writes(b"abc")
    assert model.generate("hi", seed=0).seed == 0
    assert model.generate("hi").seed != model.generate("hi").seed
    with pytest.raises(UsageError):
        model.generate("hi", seed=2**32)


def test_second_request_reuses_the_common_prefix() -> None:
    model, context = model_that_writes(b"abc")
    model.generate("hello", temperature=0)
    reply = model.generate("hello there", temperature=0)
    assert reply.usage.reused_tokens == 6 and context.tokens[:12] == [256, *b"hello there"]


def test_cancelled_while_writing_keeps_the_text_and_the_next_request_works() -> None:
    model, _ = model_that_writes(b"abcdef")
    seen: list[str] = []
    last = Chunk("")
    for last in model.run(model.encode("hi"), merged(None, {"temperature": 0}), cancelled=lambda: len(seen) >= 3):
        seen.append(last.text)
    reply = cast(Reply, last.reply)
    assert reply.finish_reason == "cancelled" and reply.text == "abc"
    assert model.generate("hi", temperature=0).text == "abcdef"


def test_cancelled_while_reading_gives_an_empty_reply() -> None:
    model, _ = model_that_writes(b"abc")
    last = list(model.run(model.encode("hi"), GenerateOptions(), cancelled=lambda: True))[-1]
    assert cast(Reply, last.reply).finish_reason == "cancelled" and last.text == ""


def test_chat_goes_through_a_template() -> None:
    model, context = model_that_writes(b"yes")
    assert model.chat([{"role": "user", "content": "Are you there?"}], temperature=0).text == "yes"
    assert bytes(t for t in context.tokens if t < 256).startswith(b"Are you there?")
    with pytest.raises(UsageError):
        model.chat([{"role": "user"}])
    assert model.chat([Message("user", "x")], temperature=0).text == "yes"


def test_unknown_option_is_named() -> None:
    with pytest.raises(UsageError, match="temprature"):
        merged(None, {"temprature": 1})


def test_json_keys() -> None:
    model, _ = model_that_writes(b"abc")
    answer = model.generate("hi", temperature=0, logprobs=2, draws=2).as_json()
    assert {"text", "tokens", "finish_reason", "seed", "usage", "timings", "plan", "logprobs", "draws"} == set(answer)
    assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "reused_tokens"}
    assert set(answer["timings"]) == {"load_s", "ttft_s", "prompt_tps", "decode_tps"}
    assert len(answer["logprobs"]) == len(answer["draws"]) == len(answer["tokens"])


def test_dry_looks_up_its_breakers_in_the_vocabulary() -> None:
    model, _ = model_that_writes(b"ab" * 20)
    assert model.generate("hi", temperature=0, dry_multiplier=0.0).text == "ab" * 20
    assert model.generate("hi", temperature=0, dry_multiplier=50.0, max_tokens=40).text != "ab" * 20


def test_governor_looks_between_parts_of_the_prompt_and_after_each_token() -> None:
    watcher = Watcher()
    model, _ = model_that_writes(b"abc", governor=watcher)
    assert model.generate("x" * 130, temperature=0).text == "abc"  # three parts of 64
    assert watcher.seen == ["rest", "tick", "tick", "tick", "token", "token", "token"]
