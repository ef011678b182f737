"""Random calls from several threads on one loaded model: each text is the one it gives alone, or an error says why not.

A long search: scripts/dev/fuzz.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import tinygguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hybridgen_gguf
from hybridgen_gguf import Busy, LanguageModel, UsageError

EXAMPLES = int(os.environ.get("HGGUF_FUZZ_EXAMPLES", "12"))
PROMPTS = ("Aaaa bbbb cccc", "Aaaa bbbb dddd", "zz 1 2 3 4", "漢字😀")
TOKENS = 12
Calls = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinygguf.build(tmp_path_factory.mktemp("threads") / "tiny.gguf", ctx=512)


def opened(path: Path) -> LanguageModel:
    return hybridgen_gguf.load(str(path), n_ctx=512, threads=1)


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[tuple[str, int, int], str]:
    """The text of each call, on a model that nothing else has used."""
    with opened(path) as model:
        return {
            (name, prompt, seed): CALLS[name](model, prompt, seed)
            for name in CALLS
            for prompt in range(len(PROMPTS))
            for seed in range(3)
        }


CANCELLED = "cancelled"  # a model that was closed says so in the reply


def _text(reply: hybridgen_gguf.Reply) -> str:
    return CANCELLED if reply.finish_reason == "cancelled" else reply.text


def _generate(model: LanguageModel, prompt: int, seed: int) -> str:
    return _text(model.generate(PROMPTS[prompt], max_tokens=TOKENS, seed=seed, ignore_end=True))


def _chat(model: LanguageModel, prompt: int, seed: int) -> str:
    messages = [{"role": "user", "content": PROMPTS[prompt]}]
    return _text(model.chat(messages, max_tokens=TOKENS, seed=seed, ignore_end=True))


def _stream(model: LanguageModel, prompt: int, seed: int) -> str:
    return _pieces(model.stream(PROMPTS[prompt], max_tokens=TOKENS, seed=seed, ignore_end=True))


def _beginning(model: LanguageModel, prompt: int, seed: int) -> str:
    """A stream that is dropped after some pieces."""
    stream = model.stream(PROMPTS[prompt], max_tokens=TOKENS, seed=seed)
    return _pieces(chunk for _, chunk in zip(range(3), stream, strict=False))


def _pieces(chunks: Iterable[hybridgen_gguf.Chunk]) -> str:
    found = ""
    for chunk in chunks:
        if chunk.reply is not None and chunk.reply.finish_reason == "cancelled":
            return CANCELLED
        found += chunk.text
    return found


def _encoded(model: LanguageModel, prompt: int, _seed: int) -> str:
    return str(model.encode(PROMPTS[prompt]).tokens)


CALLS: dict[str, Callable[[LanguageModel, int, int], str]] = {
    "generate": _generate, "chat": _chat, "stream": _stream, "beginning": _beginning, "encode": _encoded,
}  # fmt: skip
ONE = st.tuples(st.sampled_from(list(CALLS)), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2))
bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def _all_at_once(model: LanguageModel, threads: list[Calls], closes_after: int | None) -> list[tuple[object, str]]:
    """Every call with its text, or the name of the error."""
    found: list[tuple[object, str]] = []
    start = threading.Barrier(len(threads))

    def work(calls: Calls) -> None:
        start.wait(30)
        for index, call in enumerate(calls):
            if closes_after == index and calls is threads[0]:
                model.close()
            try:
                found.append((call, CALLS[call[0]](model, *call[1:])))
            except (Busy, UsageError) as error:
                found.append((call, type(error).__name__))
            except BaseException as error:
                found.append((call, f"unforeseen {error!r}"))

    workers = [threading.Thread(target=work, args=(calls,), daemon=True) for calls in threads]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a call hangs"
    return found


@bounded
@given(threads=st.lists(st.lists(ONE, min_size=1, max_size=4), min_size=2, max_size=4))
def test_calls_from_several_threads(path: Path, alone: dict[object, str], threads: list[Calls]) -> None:
    with opened(path) as model:
        for call, text in _all_at_once(model, threads, None):
            assert text in (alone[call], "Busy"), (call, text)
        last = _generate(model, 0, 0)
    assert last == alone["generate", 0, 0]


@bounded
@given(threads=st.lists(st.lists(ONE, min_size=1, max_size=3), min_size=2, max_size=3), after=st.integers(0, 2))
def test_closed_in_the_middle(path: Path, alone: dict[object, str], threads: list[Calls], after: int) -> None:
    with opened(path) as model:
        for call, text in _all_at_once(model, threads, after):
            assert text in (alone[call], CANCELLED, "Busy", "UsageError"), (call, text)
