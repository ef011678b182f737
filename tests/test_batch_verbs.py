"""`hgguf batch` and `hgguf score` on a small model: lines in, lines out, whatever is in them and whatever happens."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, QUIET, call, refused

Capture = pytest.CaptureFixture[str]
FLAGS = ("-t", 1, "-c", 128, "--parallel", 3)


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def request(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "body": {"prompt": f"Text {name}", "max_tokens": 6, "seed": 3, "ignore_eos": True, **body},
    }


def by_id(path: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {line["custom_id"]: line for line in lines}


def test_good_and_bad_lines(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    lines = [
        request("a"), request("b", n=2), "{not json", request("a"), request("long", prompt="x" * 500),
        request("key", foo=1), {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "你好"}],
                                                              "max_tokens": 4, "logprobs": True, "top_logprobs": 2}},
        request("empty", prompt=""), {"custom_id": "roles", "body": {"messages": [{"content": "x"}]}},
    ]  # fmt: skip
    source, out = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    done = call(capsys, "batch", tiny, source, "-o", out, *FLAGS, "--json")
    assert done.code == 0, done
    assert (done.json["lines"], done.json["failed"], done.json["earlier"]) == (9, 5, 0)
    assert done.json["tokens"]["written"] == 6 + 12 + 4 + 6
    found = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert len(found) == 9 and len({line["id"] for line in found}) == 9
    assert all((line["response"] is None) != (line["error"] is None) for line in found)
    errors = {line["error"]["line"]: line["error"] for line in found if line["error"]}
    assert set(errors) == {3, 4, 5, 6, 9}
    assert "line 1 already" in errors[4]["message"]
    assert "504 tokens, and the context holds" in errors[5]["message"]
    assert "body.foo" in errors[6]["message"]
    answers = {line["custom_id"]: line["response"]["body"] for line in found if line["response"]}
    assert answers["a"]["object"] == "text_completion"
    assert answers["a"]["usage"]["completion_tokens"] == 6
    assert len(answers["b"]["choices"]) == 2
    chat = answers["chat"]["choices"][0]
    assert chat["message"]["role"] == "assistant"
    assert [len(token["top_logprobs"]) for token in chat["logprobs"]["content"]] == [2] * 4


def test_the_text_is_that_of_run(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", request("a"), request("b")), tmp_path / "out.jsonl"
    assert call(capsys, "batch", tiny, source, "-o", out, *FLAGS, "-q").code == 0
    for name in "ab":
        alone = call(
            capsys, "run", tiny, "-p", f"Text {name}", "--raw", "-n", 6, "-s", 3, "--ignore-eos", "-t", 1, "--json"
        )
        assert by_id(out)[name]["response"]["body"]["choices"][0]["text"] == alone.json["text"]


def test_flags_say_what_bodies_leave_open(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"custom_id": "x", "body": {"prompt": "x"}})
    out = tmp_path / "out.jsonl"
    assert call(capsys, "batch", tiny, source, "-o", out, *FLAGS, "-n", 5, "--seed", 9, "--ignore-eos").code == 0
    body = by_id(out)["x"]["response"]["body"]
    assert (body["usage"]["completion_tokens"], body["choices"][0]["seed"]) == (5, 9)


def test_the_model_may_be_a_flag(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", request("a")), tmp_path / "out.jsonl"
    assert call(capsys, "batch", source, "-o", out, "-m", tiny, *FLAGS).code == 0
    refused(call(capsys, "batch", tiny), 2, "no input")
    refused(call(capsys, "batch", tiny, source), 2, "no output")
    refused(call(capsys, "batch", tiny, tmp_path / "none", "-o", out), 4, "cannot be read")
    refused(call(capsys, "batch", tiny, source, "-o", out), 2, "is there already")
    refused(call(capsys, "batch", tiny, source, "-o", tmp_path / "o", "--parallel", 0), 2, "--parallel 0")
    refused(call(capsys, "batch", tiny, source, "-o", tmp_path / "o", "--parallel", 65), 2, "--parallel 65")
    refused(call(capsys, "batch", tiny, source, "-o", tmp_path / "o", "--step-ms", 0), 2, "--step-ms 0")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_resume_after_an_interruption_loses_and_repeats_no_line(
    tiny: Path, tmp_path: Path, capsys: Capture, how: signal.Signals
) -> None:
    """D-18: what an interrupted run has written is gone on with, and is whole."""
    lines = [request(str(number), max_tokens=30, seed=number) for number in range(30)] + ["{bad"]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call(capsys, "batch", tiny, source, "-o", whole, *FLAGS).code == 0
    command = [*COMMAND, "batch", str(tiny), str(source), "-o", str(out), *map(str, FLAGS)]
    partial = out.with_name("out.jsonl.partial")
    for _ in range(2):
        with subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, env=os.environ | QUIET) as run:
            before = partial.stat().st_size if partial.exists() else 0
            while run.poll() is None and (not partial.exists() or partial.stat().st_size < before + 2000):
                time.sleep(0.005)
            run.send_signal(how)
            err = run.stderr.read() if run.stderr else b""
        if how == signal.SIGINT and run.returncode:
            assert run.returncode == 130 and b"--resume goes on" in err
    if partial.exists():
        partial.write_bytes(partial.read_bytes()[:-5])  # what a power cut leaves
    done = call(capsys, "batch", tiny, source, "-o", out, *FLAGS, "--resume", "--json")
    assert done.code == 0, done
    assert not partial.exists()
    assert done.json["earlier"] + done.json["lines"] == 31

    def told(path: Path) -> dict[str, Any]:
        return {
            line["id"]: line["error"] or line["response"]["body"]["choices"]
            for line in map(json.loads, path.read_text().splitlines())
        }

    assert len(out.read_text().splitlines()) == 31
    assert told(out) == told(whole)


def test_scores(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    lines = [{"custom_id": str(n), "material": f"text {n}"} for n in range(5)]
    lines += [{"custom_id": "m", "messages": [{"role": "user", "content": "x"}]}, {"custom_id": "bad", "material": 5}]
    lines += [{"custom_id": "key", "material": "x", "foo": 1}, {"custom_id": "none"}]
    source, out = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    flags = ("--prefix", "Judge this: ", "--suffix", " Answer:", "--labels", "yes,no,no way")
    done = call(capsys, "score", tiny, source, "-o", out, *FLAGS, *flags, "--json")
    assert done.code == 0, done
    found = by_id(out)
    assert {name for name, line in found.items() if line["error"]} == {"m", "bad", "key", "none"}
    body = found["3"]["response"]["body"]
    assert sum(body["probabilities"].values()) == pytest.approx(1)
    assert body["label"] == max(body["logprobs"], key=body["logprobs"].__getitem__)
    assert all(math.isfinite(value) and value < 0 for value in body["logprobs"].values())
    # A byte is a token, and a space has three: the prefix is read once, each label's last token never.
    texts = ("text▁3▁Answer:", "ye", "n", "no▁wa")
    assert body["usage"]["computed_tokens"] == sum(len(text.encode()) for text in texts)
    assert "prefix or suffix" in found["m"]["error"]["message"]


def test_scores_of_conversations_and_wrong_flags(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"custom_id": "m", "messages": [{"role": "user", "content": "x"}]})
    out = tmp_path / "out.jsonl"
    assert call(capsys, "score", tiny, source, "-o", out, *FLAGS).code == 0
    assert by_id(out)["m"]["error"] is None
    refused(call(capsys, "score", tiny, source, "-o", tmp_path / "p", "--labels", "a,,b"), 2, "--labels")
    refused(call(capsys, "score", tiny, source, "-o", tmp_path / "p", "--labels", "a,a"), 2, "--labels")
    refused(
        call(capsys, "score", tiny, source, "-o", tmp_path / "p", "--prefix", "a", "--prefix-file", "b"), 2, "--prefix"
    )
    refused(
        call(capsys, "score", tiny, source, "-o", tmp_path / "p", "--prefix-file", tmp_path / "no"), 4, "prefix file"
    )


def test_ctrl_c_is_heard_while_a_long_answer_is_written(tiny: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", request("a", max_tokens=100000)), tmp_path / "out.jsonl"
    command = [*COMMAND, "batch", str(tiny), str(source), "-o", str(out), "-t", "1", "-c", "40000", "--parallel", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | QUIET) as run:
        while run.poll() is None and not out.with_name("out.jsonl.partial").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        run.send_signal(signal.SIGINT)
        err = run.stderr.read() if run.stderr else b""
    assert run.returncode == 130, err
    assert b"stopped after 0 of 1 lines" in err
    assert not out.exists() and not out.with_name("out.jsonl.partial").exists()
