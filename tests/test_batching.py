"""Many requests on one engine thread, over a pool in memory: each text is the one it gives alone, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pool import PoolSequences

from hybridgen_gguf.batching import Batching
from hybridgen_gguf.batching.tasks import log_softmax
from hybridgen_gguf.engine.fake import FakeModel
from hybridgen_gguf.engine.sequences import Part
from hybridgen_gguf.errors import Busy, DoesNotFit, EngineError, UsageError
from hybridgen_gguf.generate import LanguageModel
from hybridgen_gguf.plan import KvPlan, Plan
from hybridgen_gguf.schedule import Rules
from hybridgen_gguf.settings import ContextSettings, ModelSettings

PROMPTS = [f"prompt {number} " * (1 + number % 5) for number in range(12)]


def opened(cells: int, *, share: bool = True, parallel: int = 4, queue: int = 100) -> tuple[LanguageModel, Any]:
    """A model over a pool of `cells`, and the pool's sequences."""
    sequences, model = PoolSequences(cells, most_named=parallel), FakeModel()
    plan = Plan(ModelSettings(), ContextSettings(cells, n_batch=64), n_layers=1, kv=KvPlan(0, cells, 0))
    what: Any = SimpleNamespace(
        plan=plan, model=model, vocabulary=model, load_s=0.5, close=lambda: None,
        context=SimpleNamespace(n_ctx=cells, tier_counters=lambda: None, settings=plan.context),
        shape=SimpleNamespace(chat_template=None, forks_anywhere=share),
    )  # fmt: skip
    rules = Rules(parallel=parallel, queue=queue)
    return LanguageModel(what, batching=Batching(rules, sequences=cast(Any, sequences))), sequences


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    with opened(4000)[0] as made:
        yield made


def alone(prompt: str, tokens: int, seed: int = 0, **more: Any) -> str:
    with opened(4000)[0] as made:
        return made.generate(prompt, max_tokens=tokens, seed=seed, ignore_end=True, **more).text


@pytest.mark.parametrize("cells", [4000, 350])
@pytest.mark.parametrize("share", [True, False])
def test_texts_in_company_are_those_alone(cells: int, share: bool) -> None:
    """In 350 cells the requests do not fit together: some are swapped out and back."""
    with opened(cells, share=share)[0] as made, ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(lambda p: made.generate(p, max_tokens=120, seed=7, ignore_end=True).text, PROMPTS))
        counts = made.counts()
    assert texts == [alone(prompt, 120, 7) for prompt in PROMPTS]
    assert (counts.swapped > 0) == (cells == 350)
    assert (counts.cells_used, counts.running, counts.waiting, counts.failed) == (0, 0, 0, 0)
    assert share or counts.cells_free == cells


def test_greedy_texts_and_streams_of_asyncio(model: LanguageModel) -> None:
    async def text(prompt: str) -> str:
        return "".join([chunk.text async for chunk in cast(Any, model.stream(prompt, max_tokens=20, temperature=0))])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(text, PROMPTS))

    assert asyncio.run(all_of_them()) == [alone(prompt, 20, temperature=0) for prompt in PROMPTS]


def test_an_asyncio_task_that_is_cancelled_frees_its_cells(model: LanguageModel) -> None:
    async def main() -> None:
        async def read() -> None:
            async for _ in cast(Any, model.stream("x", ignore_end=True)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert model.counts().cells_used == 0


def test_interleaved_streams(model: LanguageModel) -> None:
    streams = [model.stream(prompt, max_tokens=30, seed=3, ignore_end=True) for prompt in PROMPTS]
    texts = [""] * len(streams)
    open_ = dict(enumerate(streams))
    while open_:
        for index, stream in list(open_.items()):
            chunk = next(stream)
            texts[index] += chunk.text
            if chunk.reply is not None:
                del open_[index]
                assert chunk.reply.text == texts[index]
                assert list(stream) == []
    assert texts == [alone(prompt, 30, 3) for prompt in PROMPTS]


def used_soon(model: LanguageModel, cells: int) -> bool:
    return any(model.counts().cells_used == cells or time.sleep(0.01) for _ in range(500))  # type: ignore[func-returns-value]


def test_closed_and_forgotten_streams_free_their_cells(model: LanguageModel) -> None:
    first, second = (model.stream("hello", max_tokens=3000, ignore_end=True) for _ in range(2))
    next(first), next(second)
    assert model.counts().running == 2
    cast(Any, first).close()
    assert model.counts().running == 1  # messages are heard in their order
    del second
    gc.collect()
    counts = model.counts()
    assert (counts.running, counts.cells_used) == (0, 0)
    assert list(first) == []


def test_cancelled_while_its_prompt_is_read() -> None:
    made, sequences = opened(4000)
    reading = threading.Event()
    sequences.between = lambda: (reading.set(), time.sleep(0.01))
    with made:
        stream = made.stream("x" * 3000, max_tokens=5)
        assert reading.wait(5)
        cast(Any, stream).close()
        assert used_soon(made, 0)
        assert made.counts().computed < 3000
        assert made.generate("y", max_tokens=2, seed=0, ignore_end=True).text == alone("y", 2)


def test_a_step_that_fails_ends_the_request_at_fault_alone() -> None:
    made, sequences = opened(4000)

    def faults(parts: Sequence[Part]) -> str:
        return "no" if any(ord("!") in part.tokens for part in parts) else ""

    sequences.faults = faults
    with made, ThreadPoolExecutor(4) as threads:
        good = threads.map(
            lambda p: made.generate(p, max_tokens=20, seed=1, logit_bias=((33, -math.inf),)).text, PROMPTS[:3]
        )
        with pytest.raises(EngineError, match="no"):
            made.generate("wrong!", max_tokens=20)
        assert list(good) == [alone(p, 20, 1, logit_bias=((33, -math.inf),)) for p in PROMPTS[:3]] or sequences.log
        assert made.counts().failed == 1
        assert used_soon(made, 0)


def test_logits_without_numbers_end_one_request() -> None:
    made, sequences = opened(4000)
    plain = sequences.logits
    sequences.logits = lambda tokens: plain(tokens) * (np.nan if 90 in tokens else 1)  # Z
    with made:
        good = made.stream("abc", max_tokens=50, seed=1, logit_bias=((90, -math.inf),), ignore_end=True)
        with pytest.raises(Exception, match="NaN"):
            made.generate("Z", max_tokens=5)
        assert len(list(good)) > 1


def test_more_than_fits_and_more_than_may_wait() -> None:
    made, sequences = opened(300, queue=2, parallel=1)
    sequences.between = lambda: time.sleep(0.002)
    with made:
        with pytest.raises(DoesNotFit, match="has 301 tokens, and the context holds 300") as caught:
            made.generate("x" * 300)
        assert caught.value.nearest == {"n_ctx": 512}
        streams = [made.stream("x", ignore_end=True) for _ in range(3)]
        with pytest.raises(Busy, match="3 requests are open"):
            made.stream("x")
        for stream in streams:
            cast(Any, stream).close()


def test_a_full_context_ends_with_length() -> None:
    with opened(64)[0] as made:
        reply = made.generate("hi", ignore_end=True, seed=0)
    assert (reply.finish_reason, len(reply.tokens)) == ("length", 64 - 3 + 1)


def test_close_ends_streams_with_an_error(model: LanguageModel) -> None:
    stream = model.stream("x", ignore_end=True)
    next(stream)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        for _ in stream:
            pass
    with pytest.raises(UsageError, match="closed"):
        model.generate("x")


def test_a_forked_child_is_told(model: LanguageModel) -> None:
    model.generate("x", max_tokens=1)
    pid = os.fork()
    if pid == 0:
        try:
            model.stream("x")
        except UsageError as error:
            os._exit(7 if "another process" in error.what else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_batch_gives_each_prompt_its_text_or_its_error(model: LanguageModel) -> None:
    prompts = [PROMPTS[0], "x" * 5000, *PROMPTS[1:]]
    done = list(model.batch(prompts, max_tokens=10, seed=5, ignore_end=True, in_order=True))
    assert [item.index for item in done] == list(range(len(prompts)))
    assert isinstance(done[1].error, DoesNotFit)
    texts = [item.result[0].text for item in done if item.result is not None]
    assert texts == [alone(prompt, 10, 5) for prompt in PROMPTS]


def test_several_answers_fork_one_prompt(model: LanguageModel) -> None:
    prompt = "a long prompt " * 50
    (done,) = model.batch([prompt], n=4, max_tokens=10, seed=5, ignore_end=True)
    assert done.result is not None
    assert [reply.text for reply in done.result] == [alone(prompt, 10, 5, stream=at) for at in range(4)]
    assert model.counts().computed == len(prompt) + 1 + 3 + 4 * 9  # the last token of a prompt again, for its logits


def test_an_unfinished_batch_leaves_nothing(model: LanguageModel) -> None:
    results = model.batch(PROMPTS * 100, max_tokens=100, ignore_end=True)
    next(results)
    cast(Any, results).close()
    assert model.counts().running == 0


def test_scores_are_the_log_softmax_of_the_labels_tokens() -> None:
    made, sequences = opened(4000)
    with made:
        prefix, materials, labels = "p" * 700, [f"material {number}" for number in range(9)], ["y", "no", "nobody"]
        done = list(made.score(prefix, materials, labels))
        computed = made.counts().computed
        assert made.counts().cells_used == 0
    assert {item.index for item in done} == set(range(9))
    for item in done:
        score = item.result
        assert score is not None
        for at, label in enumerate(labels):
            tokens, expected = [256, *(prefix + materials[item.index]).encode()], 0.0
            for token in label.encode():
                expected += float(log_softmax(sequences.logits(tokens))[token])
                tokens.append(token)
            assert score.logprobs[at] == pytest.approx(expected, abs=1e-9)
        total = sum(math.exp(logprob) for logprob in score.logprobs)
        expected_shares = [math.exp(logprob) / total for logprob in score.logprobs]
        assert score.probabilities == pytest.approx(expected_shares, rel=1e-9)
        assert score.computed == len(materials[0]) + (2 - 1) + (6 - 1)
    assert computed == 701 + 9 * (len(materials[0]) + 1 + 5)


def test_a_judge_reads_its_prefix_once() -> None:
    with opened(8000, parallel=8)[0] as made:
        list(made.score(list(range(200)) * 10 + [5] * 48, [[7] * 64] * 16, ["y", "n"]))
        assert made.counts().computed == 2048 + 16 * 64


def test_a_model_for_one_request_says_how_to_get_more() -> None:
    from test_generate import model_that_writes

    made, _ = model_that_writes(b"abc")
    with pytest.raises(UsageError, match="one request at a time"):
        made.batch(["x"])


def test_thousands_of_tiny_requests(model: LanguageModel) -> None:
    done = list(model.batch(["a", "b", "c"] * 700, max_tokens=1, seed=1, ignore_end=True))
    assert len(done) == 2100
    assert len({item.result[0].text for item in done if item.result is not None and item.index % 3 == 0}) == 1


def test_a_fault_of_the_loop_ends_every_request_with_an_error(model: LanguageModel) -> None:
    def broken(_now: float) -> Any:
        raise ZeroDivisionError

    loop = model._loop
    assert loop is not None
    loop.scheduler.plan = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        model.generate("x")
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        model.generate("x")
