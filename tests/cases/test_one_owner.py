"""One loaded model used twice at once: each text is the one it gives alone, or an error says why not (A-03)."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinygguf

import hybridgen_gguf
from hybridgen_gguf import Busy, LanguageModel, UsageError

PROMPTS = ("Aaaa bbbb cccc", "zz 1 2 3 4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("owner") / "tiny.gguf"
    tinygguf.build(path, ctx=512)
    return path


@pytest.fixture
def model(tiny: Path) -> Iterator[LanguageModel]:
    with hybridgen_gguf.load(str(tiny), n_ctx=512, threads=1) as opened:
        yield opened


def text(model: LanguageModel, prompt: str, tokens: int = 30) -> str:
    return model.generate(prompt, max_tokens=tokens, temperature=0).text


def in_a_process(code: str, tiny: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    head = f"import hybridgen_gguf, os, sys, threading, time\nPATH = {str(tiny)!r}\n"
    command = [sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(code)]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def test_interleaved_streams(model: LanguageModel) -> None:
    alone = text(model, PROMPTS[0])
    first = model.stream(PROMPTS[0], max_tokens=30, temperature=0)
    second = model.stream(PROMPTS[1], max_tokens=30, temperature=0)
    pieces = [next(first).text]
    with pytest.raises(Busy, match="another stream"):
        next(second)
    with pytest.raises(Busy):
        model.generate(PROMPTS[1], max_tokens=1)
    pieces += [chunk.text for chunk in first]
    assert "".join(pieces) == alone
    assert text(model, PROMPTS[1]) == text(model, PROMPTS[1])


def test_threads_wait_for_each_other(model: LanguageModel) -> None:
    alone = [text(model, prompt) for prompt in PROMPTS]
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda prompt: text(model, prompt), PROMPTS * 2, timeout=60))
        assert found == alone * 2


def test_a_stream_of_another_thread_is_not_waited_for(model: LanguageModel) -> None:
    stream = model.stream(PROMPTS[0], max_tokens=30)
    next(stream)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            text(model, PROMPTS[1])
        except Busy as busy:
            errors.append(busy)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert len(errors) == 1, "neither a hang nor an answer while the stream is open"
    stream.close()  # type: ignore[attr-defined]


def test_asyncio_given_up_while_the_thread_goes_on(model: LanguageModel) -> None:
    alone = text(model, PROMPTS[1])

    async def main() -> str:
        slow = asyncio.create_task(asyncio.to_thread(text, model, PROMPTS[0], 400))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(slow), 0.001)
        answer = await asyncio.to_thread(text, model, PROMPTS[1])
        await slow
        return answer

    assert asyncio.run(main()) == alone


def test_a_dropped_stream_frees_the_model(model: LanguageModel) -> None:
    alone = text(model, PROMPTS[1])
    stream = model.stream(PROMPTS[0], max_tokens=30)
    next(stream)
    del stream
    assert text(model, PROMPTS[1]) == alone


def test_closed_while_another_thread_writes(tiny: Path) -> None:
    model = hybridgen_gguf.load(str(tiny), n_ctx=512, threads=1)
    stream = model.stream(PROMPTS[0], max_tokens=400)
    next(stream)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        next(stream)
    for use in (lambda: text(model, "hi"), lambda: model.encode("hi")):
        with pytest.raises(UsageError, match="closed"):
            use()
    model.close()


def test_closed_from_another_thread(tiny: Path) -> None:
    code = """
    for _ in range(5):
        model = hybridgen_gguf.load(PATH, n_ctx=512, threads=1)
        def write():
            try:
                model.generate("Aaaa", max_tokens=480, ignore_end=True)
            except hybridgen_gguf.UsageError:
                pass
        thread = threading.Thread(target=write); thread.start(); time.sleep(0.02)
        model.close(); thread.join(20)
        assert not thread.is_alive()
    print("whole")
    """
    done = in_a_process(code, tiny)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_a_forked_child_is_told_and_can_load_its_own(tiny: Path) -> None:
    code = """
    model = hybridgen_gguf.load(PATH, n_ctx=512, threads=2)
    alone = model.generate("Aaaa", max_tokens=8, temperature=0).text
    child = os.fork()
    if not child:
        for use in (lambda: model.generate("Aaaa", max_tokens=1), lambda: model.encode("Aaaa")):
            try:
                use()
            except hybridgen_gguf.UsageError as error:
                assert "another process" in str(error)
            else:
                os._exit(3)
        model.close()
        with hybridgen_gguf.load(PATH, n_ctx=512, threads=2) as own:
            os._exit(0 if own.generate("Aaaa", max_tokens=8, temperature=0).text == alone else 4)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert model.generate("Aaaa", max_tokens=8, temperature=0).text == alone
    """
    done = in_a_process(code, tiny)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_the_interpreter_ends_while_a_thread_writes(tiny: Path) -> None:
    code = """
    model = hybridgen_gguf.load(PATH, n_ctx=512, threads=2)
    def write():
        while True:
            model.generate("Aaaa", max_tokens=400, ignore_end=True)
    threading.Thread(target=write, daemon=True).start()
    time.sleep(0.05)
    """
    for _ in range(3):
        done = in_a_process(code, tiny)
        assert done.returncode == 0, (done.returncode, done.stderr)


def test_copies_are_refused_with_what_to_do(model: LanguageModel) -> None:
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="pickled") as caught:
            use(model)
        assert "load" in caught.value.hint


def test_ctrl_c_reaches_the_caller_while_a_prompt_is_read(tiny: Path) -> None:
    code = """
    model = hybridgen_gguf.load(PATH, n_ctx=512, threads=1)
    alone = model.generate("Aaaa", max_tokens=8, temperature=0).text
    print("ready", flush=True)
    try:
        while True:
            model.generate("b" * 500, max_tokens=1)
            model.opened.context.clear(); model._decoder.tokens.clear()
    except KeyboardInterrupt:
        print("interrupted")
    assert model.generate("Aaaa", max_tokens=8, temperature=0).text == alone
    """
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    head = f"import hybridgen_gguf\nPATH = {str(tiny)!r}\n{ctrl_c}\n"
    command = [sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(code)]
    for pause in (0.05, 0.2, 0.35):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
            try:
                out, err = process.communicate(timeout=30)
            finally:
                process.kill()
        assert (process.returncode, out) == (0, "interrupted\n"), err
