"""Files of requests without a model: what a line asks, what the output holds, and what an interruption leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.errors import BadFile, Busy, NotFound, UsageError
from hybridgen_gguf.lines.body import asked_of, body_of
from hybridgen_gguf.lines.sink import Sink
from hybridgen_gguf.lines.source import Line, Source
from hybridgen_gguf.lines.wire import answered, failed
from hybridgen_gguf.request import GenerateOptions

DEFAULTS = GenerateOptions(max_tokens=9, seed=4)


def source_of(folder: Path, *lines: Any) -> Source:
    path = folder / "in.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    return Source(path)


def test_lines_are_numbered_named_and_checked(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, {"custom_id": "甲", "body": {}}, b"", b"{half", {"custom_id": "甲"}, {"body": {}}, b"[1]",
        b"\xff\xfe", {"custom_id": 7}, {"custom_id": "last"},
    )  # fmt: skip
    lines = list(source)
    assert len(source) == len(lines) == 8
    assert [line.number for line in lines] == [1, 3, 4, 5, 6, 7, 8, 9]
    assert [bool(line.error) for line in lines] == [False, True, True, True, True, True, True, False]
    assert "stands on line 1 already" in lines[2].error
    assert lines[0].custom_id == "甲"
    assert len({line.id for line in lines}) == 8
    assert [line.id for line in source] == [line.id for line in lines]
    assert source.longest == max(len(raw) for raw in source.path.read_bytes().splitlines(keepends=True))


def test_an_id_depends_on_number_and_bytes(tmp_path: Path) -> None:
    one, two = source_of(tmp_path, {"custom_id": "a"}, {"custom_id": "b"})
    other, same = source_of(tmp_path, {"custom_id": "c"}, {"custom_id": "b"})
    assert two.id == same.id and one.id != other.id


def test_an_input_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Source(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="holds no line"):
        source_of(tmp_path, b"", b"  ")


def test_bodies() -> None:
    chat = body_of(
        {"messages": [{"role": "user", "content": "x"}], "model": "m", "max_tokens": 3, "temperature": 0, "n": 2,
         "stop": "a", "seed": 5, "logit_bias": {"7": -1}, "logprobs": True, "top_logprobs": 2, "user": "u",
         "tools": None},
        DEFAULTS, chat=True,
    )  # fmt: skip
    options = chat.options
    assert (options.max_tokens, options.stop, options.seed, chat.n, chat.top_logprobs) == (3, ("a",), 5, 2, 2)
    assert (options.sample.temperature, options.sample.logit_bias, options.sample.logprobs) == (0, ((7, -1.0),), 2)
    text = asked_of({"custom_id": "a", "body": {"prompt": "hi", "top_k": 3.0}}, DEFAULTS)
    assert (text.prompt, text.options.max_tokens, text.options.seed, text.options.sample.top_k) == ("hi", 9, 4, 3)
    assert text.top_logprobs is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "no body"),
        ({"body": []}, "no body"),
        ({"body": {"prompt": "x"}, "extra": 1}, "'extra' is not a key"),
        ({"body": {"prompt": "x"}, "method": "GET"}, "method 'GET'"),
        ({"body": {"prompt": "x"}, "url": "/v1/embeddings"}, "url '/v1/embeddings'"),
        ({"body": {"prompt": "x"}, "url": "/v1/chat/completions"}, "body.messages is missing"),
        ({"body": {}}, "body.prompt is missing"),
        ({"body": {"prompt": "x", "foo": 1}}, "body.foo is not known"),
        ({"body": {"prompt": ["x"]}}, "body.prompt is not a text"),
        ({"body": {"prompt": "x", "stream": True}}, "body.stream"),
        ({"body": {"prompt": "x", "max_tokens": 1.5}}, "body.max_tokens is not a whole number"),
        ({"body": {"prompt": "x", "max_tokens": True}}, "body.max_tokens is not a number"),
        ({"body": {"prompt": "x", "n": 0}}, "body.n 0"),
        ({"body": {"prompt": "x", "seed": -7}}, "--seed -7"),
        ({"body": {"prompt": "x", "temperature": "hot"}}, "body.temperature is not a number"),
        ({"body": {"prompt": "x", "top_p": 7}}, "--top-p 7"),
        ({"body": {"prompt": "x", "stop": [1]}}, "body.stop is not"),
        ({"body": {"prompt": "x", "response_format": {}}}, "body.response_format is not known"),
        ({"body": {"messages": [], "top_logprobs": 3}}, "needs body.logprobs"),
        ({"body": {"messages": "x"}}, "body.messages is not a list"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(line: dict[str, Any], words: str) -> None:
    from hybridgen_gguf.sample.sampler import check_seed

    with pytest.raises(UsageError) as caught:
        asked = asked_of(line, DEFAULTS)
        check_seed(asked.options.seed or 0)
    assert words in caught.value.what


KEYS = st.sampled_from(("prompt", "n", "stop", "seed", "temperature", "logit_bias", "x"))
VALUES = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.lists(st.integers()))


@given(st.dictionaries(KEYS, VALUES))
@settings(max_examples=200, deadline=None)
def test_any_body_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        assert body_of(body, DEFAULTS, chat=False).prompt == body["prompt"]
    except UsageError as error:
        assert error.what


def line(number: int) -> Line:
    return Line(number, f"batch_req_{number}", str(number), {})


def sink(folder: Path, count: int, *, resume: bool = False) -> Sink:
    return Sink(folder / "out.jsonl", [line(n).id for n in range(count)], resume=resume, source=folder / "in.jsonl")


def test_an_output_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    with sink(tmp_path, 2) as out:
        out.write(answered(line(0), {"text": "é"}))
        assert not out.path.exists()
        out.write(failed(line(1), "bad"))
        out.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
    first, second = map(json.loads, out.path.read_text().splitlines())
    assert first["response"]["body"] == {"text": "é"} and first["error"] is None
    assert second["response"] is None and second["error"]["message"] == "bad"
    with pytest.raises(UsageError, match="is there already"):
        sink(tmp_path, 2)
    with sink(tmp_path, 2, resume=True) as again:
        assert again.complete and again.done == {"batch_req_0": True, "batch_req_1": False}
    with pytest.raises(UsageError, match="complete, for an input of fewer lines"):
        sink(tmp_path, 3, resume=True)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_line_is_taken_off_and_runs_again(tmp_path: Path, cut: int) -> None:
    with sink(tmp_path, 3) as out:
        for number in range(2):
            out.write(answered(line(number), {}))
    data = out.partial.read_bytes()
    out.partial.write_bytes(data[:-cut])
    with pytest.raises(UsageError, match="begun by an earlier run"):
        sink(tmp_path, 3)
    with sink(tmp_path, 3, resume=True) as again:
        assert set(again.done) == {"batch_req_0"}
        again.write(answered(line(1), {}))
        again.write(answered(line(2), {}))
        again.publish()
    ids = [json.loads(text)["id"] for text in again.path.read_text().splitlines()]
    assert ids == ["batch_req_0", "batch_req_1", "batch_req_2"]


def test_an_input_that_has_changed_and_files_of_others(tmp_path: Path) -> None:
    with sink(tmp_path, 3) as out:
        out.write(answered(line(2), {}))
    with pytest.raises(UsageError, match="the input has changed"):
        sink(tmp_path, 2, resume=True)
    out.partial.write_text("notes of mine\n")
    with pytest.raises(BadFile, match="not one of ours"):
        sink(tmp_path, 3, resume=True)
    assert out.partial.read_text() == "notes of mine\n"


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="is the input"):
        Sink(tmp_path / "in.jsonl", [], resume=False, source=tmp_path / "in.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        Sink(tmp_path, [], resume=False, source=tmp_path / "in.jsonl")
    with pytest.raises(NotFound, match="does not exist"):
        Sink(tmp_path / "no" / "out", [], resume=False, source=tmp_path / "in.jsonl")
    with sink(tmp_path, 1), pytest.raises(Busy, match="another run"):
        sink(tmp_path, 1)
