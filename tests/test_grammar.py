"""Answers held to a grammar or a JSON schema: what comes out fits, the draw is exact, what cannot be used is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinygguf
from command_line import call, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hybridgen_gguf
from hybridgen_gguf.answer import AnswerStream
from hybridgen_gguf.engine.grammar import Grammar
from hybridgen_gguf.engine.handles import Model
from hybridgen_gguf.errors import SampleError, UsageError
from hybridgen_gguf.generate import LanguageModel
from hybridgen_gguf.grammar import Guard
from hybridgen_gguf.grammar.check import checked, names_tokens
from hybridgen_gguf.grammar.schema import prepared
from hybridgen_gguf.prompt.reasoning import KNOWN
from hybridgen_gguf.settings import ModelSettings

Capture = pytest.CaptureFixture[str]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "城市": {"enum": ["北京", "上海 \"旧\"", "a\\b"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/孩子"}]},
    },
    "required": ["name", "age", "城市", "tags", "child"],
    "additionalProperties": False,
    "$defs": {
        "孩子": {
            "type": "object",
            "properties": {"name": {"const": "小"}, "child": {"$ref": "#/$defs/儿子"}},
            "required": ["name", "child"],
        },
        "儿子": {"const": 1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Path) -> Iterator[LanguageModel]:
    with hybridgen_gguf.load(str(smollm2), n_ctx=1024, threads=2, threads_batch=2) as model:
        yield model


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Iterator[Model]:
    with Model(smollm2, ModelSettings(), vocab_only=True) as model:
        yield model


# --- whole answers ---


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
def test_answers_fit_a_schema(smollm2_model: LanguageModel, changes: dict[str, Any]) -> None:
    for seed in range(20 if not changes else 2):
        question = [{"role": "user", "content": "Describe a person as JSON. 用中文"}]
        reply = smollm2_model.chat(question, json_schema=PERSON, seed=seed, max_tokens=400, **changes)
        assert reply.finish_reason == "stop", reply.text
        check_person(json.loads(reply.text))


def check_person(value: Any) -> None:
    """PERSON by hand."""
    assert list(value) == ["name", "age", "城市", "tags", "child"]
    assert 1 <= len(value["name"]) <= 12 and 0 <= value["age"] <= 120 and type(value["age"]) is int
    assert value["城市"] in ("北京", '上海 "旧"', "a\\b")
    assert 1 <= len(value["tags"]) <= 3 and all(len(tag) <= 8 for tag in value["tags"])
    assert value["child"] in (None, {"name": "小", "child": 1})


@pytest.mark.real
def test_a_schema_that_names_itself(smollm2_model: LanguageModel) -> None:
    schema = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}
    replies = [smollm2_model.generate("x", json_schema=schema, seed=s, max_tokens=60, temperature=2) for s in range(8)]
    done = [json.loads(reply.text) for reply in replies if reply.finish_reason == "stop"]
    assert done
    for value in done:
        while value:
            assert len(value) == 1
            value = value[0]
        assert value in (None, [])


@pytest.mark.real
def test_the_verb_takes_all_spellings(smollm2: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "语法.gbnf").write_text('root ::= "北京" | "上海"\n', encoding="utf-8")
    (tmp_path / "schema.json").write_text('\ufeff{"enum": ["北京"]}', encoding="utf-8")
    common = ("run", smollm2, "-p", "Where?", "-c", 256, "-s", 3, "-q")
    assert call(capsys, *common, "--grammar", 'root ::= "北京"').out == "北京\n"
    assert call(capsys, *common, "--grammar-file", tmp_path / "语法.gbnf").out in ("北京\n", "上海\n")
    assert call(capsys, *common, "-j", '{"enum": ["北京"]}').out == '"北京"\n'
    assert call(capsys, *common, "-jf", tmp_path / "schema.json").out == '"北京"\n'
    done = call(capsys, *common, "-j", "{}", "-n", 1)
    assert done.code == 0 and done.out[:1] in '{["-0123456789tfn'


@pytest.mark.real
def test_equal_seeds_give_equal_answers(smollm2_model: LanguageModel) -> None:
    texts = [smollm2_model.generate("A list: ", grammar="root ::= [a-z ]{5,40}", seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.real
def test_a_grammar_that_allows_all_changes_nothing(smollm2_model: LanguageModel) -> None:
    changes: dict[str, Any] = {"seed": 5, "max_tokens": 30}
    free = smollm2_model.generate("Once upon a time", **changes)
    held = smollm2_model.generate("Once upon a time", grammar="root ::= .*", **changes)
    assert free.tokens == held.tokens


@pytest.mark.real
def test_the_end_of_the_grammar_is_the_end(smollm2_model: LanguageModel) -> None:
    asked: dict[str, Any] = {"grammar": 'root ::= "yes" " sir"?', "temperature": 0}
    reply = smollm2_model.generate("Is water wet? Answer: ", **asked)
    assert reply.text in ("yes", "yes sir") and reply.finish_reason == "stop"
    longest = smollm2_model.generate("Is water wet? Answer: ", ignore_end=True, **asked)
    assert longest.text == "yes sir" and longest.finish_reason == "stop"
    cut = smollm2_model.generate("Is water wet? Answer: ", stop="e", **asked)
    assert cut.text == "y" and cut.finish_reason == "stop"
    assert smollm2_model.generate("x", grammar='root ::= ""').text == ""


@pytest.mark.real
def test_tokens_that_a_grammar_names(smollm2_model: LanguageModel) -> None:
    reply = smollm2_model.generate("Hi", grammar='root ::= "a" <|im_start|> "b"', temperature=0, max_tokens=3)
    control = smollm2_model.opened.vocabulary.control_tokens()["<|im_start|>"]
    assert reply.tokens[1] == control and reply.text == "ab"
    spelled = smollm2_model.generate("Hi", grammar='root ::= "<|im_start|>"', temperature=0)
    assert spelled.text == "<|im_start|>" and control not in spelled.tokens


# --- the draw ---


def chains() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "top_k": st.sampled_from([-1, 1, 3, 40]),
            "top_p": st.sampled_from([0.5, 0.95, 1.0]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "temperature": st.sampled_from([0.0, 0.8, 1.0, 2.0]),
            "typical_p": st.sampled_from([0.7, 1.0]),
            "repeat_penalty": st.sampled_from([1.0, 1.3]),
            "draws": st.sampled_from([0, 2]),
            "logprobs": st.sampled_from([0, 2]),
        }
    )


class Listed:
    """Allows the tokens that it lists, and counts what it is asked."""

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self.list, self.whole = allowed, 0

    def allowed(self, ids: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        self.whole += ids is None
        return self.list.copy() if ids is None else self.list[ids]


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(0, 2**32 - 1), st.floats(0.002, 1), st.booleans())
def test_the_draw_is_that_of_masked_logits(chain: dict[str, Any], seed: int, share: float, native: bool) -> None:
    from hybridgen_gguf.engine.library import load
    from hybridgen_gguf.engine.native_sample import native_sampler
    from hybridgen_gguf.sample.sampler import SampleOptions, Sampler

    rng = np.random.default_rng(seed)
    n = 3000
    logits = (rng.normal(size=n) * 4).astype(np.float32)
    allowed = rng.random(n) < share
    allowed[rng.integers(n)] = True
    passes = native_sampler(load().llama) if native else None
    sampler = Sampler(SampleOptions(**chain), n_vocab=n, seed=seed, native=passes)
    constraint = Listed(allowed)
    found = sampler.draw(logits, 7, constraint)
    right = sampler.draw(np.where(allowed, logits, np.float32(-np.inf)), 7)
    assert (found.token, found.draws) == (right.token, right.draws) and allowed[found.token]
    if chain["logprobs"]:  # the model's own, as without a constraint
        wide = logits.astype(np.float64)
        assert found.logprob == pytest.approx(wide[found.token] - np.logaddexp.reduce(wide))
    if share > 0.5 and (0 < chain["top_k"] <= 40 and chain["repeat_penalty"] == 1.0):
        assert constraint.whole == 0  # no question about the whole vocabulary


def test_nothing_allowed_is_said() -> None:
    from hybridgen_gguf.sample.sampler import SampleOptions, Sampler

    sampler = Sampler(SampleOptions(), n_vocab=100, seed=1)
    with pytest.raises(SampleError, match="no token of the vocabulary"):
        sampler.draw(np.zeros(100, np.float32), 0, Listed(np.zeros(100, bool)))


# --- the engine's rules ---

TEXTS = ('{"a": "', '{"a": "é', "", '{"a": "x", "b"', '{"a": "日本', '{"a": "x"}')


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_one_pass_over_all_tokens_is_the_engines_own(vocabulary: Model, text: str) -> None:
    """`ids` None goes by first characters, ids by llama_grammar_apply_impl."""
    grammar = checked(vocabulary.path, None, '{"type": "object"}').text
    with Grammar(vocabulary, grammar) as rules:
        for part in text:
            rules.accept_text(part)
        every = np.arange(vocabulary.n_vocab)
        assert (rules.allowed(None) == rules.allowed(every)).all()
        assert rules.finished == (text == TEXTS[-1])


@pytest.mark.real
def test_half_characters(vocabulary: Model) -> None:
    """Bytes of a character come as tokens of their own; only those that can become an allowed one may."""
    with Grammar(vocabulary, 'root ::= "漢" | "漣"') as rules:
        for byte in "漢".encode():
            token = next(t for t in range(vocabulary.n_vocab) if vocabulary.token_bytes(t) == bytes([byte]))
            every = np.arange(vocabulary.n_vocab)
            allowed = rules.allowed(None)
            assert allowed[token] and (allowed == rules.allowed(every)).all()
            rules.accept(token)
        assert rules.finished


@pytest.mark.real
def test_a_token_that_does_not_fit_is_an_error(vocabulary: Model) -> None:
    with Grammar(vocabulary, 'root ::= "a" "b"') as rules:
        with pytest.raises(SampleError, match="does not fit"):
            rules.accept(vocabulary.tokenize(b"zzz", False, False)[0])
        rules.accept(vocabulary.tokenize(b"a", False, False)[0])
        assert not rules.finished
        with pytest.raises(SampleError, match="does not fit"):
            rules.accept_text("x")


@pytest.mark.real
def test_an_ambiguous_grammar_ends_with_an_error(vocabulary: Model) -> None:
    """Each bracket doubles the ways to go on."""
    text = 'root ::= "(" root ")" [a]? | "(" root ")" [b]? | "x"'
    with Grammar(vocabulary, text) as rules, pytest.raises(SampleError, match="too complex"):
        for _ in range(64):
            rules.accept_text("(")


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root", "expecting ::= at line 1, column 5"),
        ('root ::= "a"\n\nroot ::= (', "expecting ')' at line 3, column 11"),
        ('root ::= "a\n', "unexpected end at line 2, column 1"),
        ('root ::= "a"\nb := "c"', "expecting ::= at line 2, column 3"),
        ('root ::= [a-', "unexpected end"),
        ('x ::= "a"', "has no rule named root"),
        ("# nothing\n", "has no rules"),
        ("", "is empty"),
        (" \n", "is empty"),
        ('root ::= root "a" | "b"', "left recursion in root"),
        ('root ::= a "x"\na ::= b a "y" | "z"\nb ::= c\nc ::= ""', "left recursion in a"),
        ("root ::= a\na ::= e a\ne ::= f\nf ::= \"\"", "left recursion in a"),
        ('root ::= "a" |\n  missing', "no rule missing, named at line 2, column 3"),
        ('root ::= "\\q"', "unknown escape at line 1, column 11"),
        ('root ::= "a"{9999}', "number of repetitions"),
        ("root ::= <no-such-token>", "invalid token"),
        ("root ::= " + "(" * 300_000 + '"a"' + ")" * 300_000, "too deep or too complex"),
        ("root ::= " + ' "a"?' * 20_000, "too deep or too complex"),
        ("root ::= " + "a" * (1 << 20), "more than 1 MiB"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_grammars_that_cannot_be_used(tiny: Path, grammar: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as told:
        checked(tiny, grammar, None)
    assert len(told.value.what) < 400 and "\n" not in told.value.what and told.value.hint


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("", "is empty"),
        ("{", "is not JSON: Expecting property name"),
        ('{\n "type": }', "at line 2, column 10"),
        ("[]", "an object is needed at #"),
        ("false", "false allows nothing at #"),
        ('{"type": "thing"}', "unrecognized type thing"),
        ('{"properties": {"a": {"enum": []}}}', "enum must be a non-empty array"),
        ('{"properties": {"a": false}}', "false allows nothing at #/properties/a"),
        ('{"$ref": "https://example.org/x.json"}', "is not in the schema"),
        ('{"items": {"$ref": "file:///etc/passwd"}}', "is not in the schema"),
        ('{"$ref": "#/$defs/a"}', "has nothing at #/$defs/a"),
        ('{"type": "string", "pattern": "^[z-a$"}', "attern"),
        ('{"type": "array", "minItems": 3000, "items": {"type": "integer"}}', "repetitions"),
        ('{"type": "string", "minLength": -1}', "minLength must be a non-negative integer"),
        ('{"type": "integer", "minimum": ' + "9" * 5000 + "}", "a number too long"),
        ("[" * 100_000, "nested too deep"),
        ('{"items":' * 20_000 + "{}" + "}" * 20_000, "too deep"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_schemas_that_cannot_be_used(tiny: Path, schema: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as told:
        checked(tiny, None, schema)
    assert len(told.value.what) < 400 and "\n" not in told.value.what and told.value.hint


def test_flags_that_exclude_each_other(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    bad = ("run", tiny, "--raw", "-p", "hi", "-c", 256, "--grammar", "root = x")
    refused(call(capsys, *bad), 2, "expecting ::= at line 1, column 6")
    both = ("run", tiny, "--raw", "-p", "hi", "--grammar", "x", "-j", "{}")
    refused(call(capsys, *both), 2, "--grammar and -j were both given")
    refused(call(capsys, "run", tiny, "-p", "x", "--grammar-file", tmp_path / "no"), 4, "the grammar file")
    refused(call(capsys, "run", tiny, "-p", "x", "-jf", tmp_path), 4, "the schema file")
    with pytest.raises(UsageError, match="a grammar and a JSON schema"):
        hybridgen_gguf.request.merged(None, {"grammar": "x", "json_schema": "{}"})


def test_words_without_an_effect_are_named(tiny: Path, capsys: Capture) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "number", "minimum": 3}}, "required": ["b"]}'
    run = ("run", tiny, "--raw", "-p", "hi", "-c", 256, "-n", 1, "-j", schema)
    told = call(capsys, *run).err  # by the verb, and not by Python's warnings
    assert "minimum at #/properties/a" in told and "required b (not among the properties) at #" in told
    refused(call(capsys, *run, "--strict"), 2, "required b (not among the properties) at # has no effect")
    pattern = ("run", tiny, "--raw", "-p", "hi", "-c", 256, "-n", 1, "-j", '{"type": "string", "pattern": "a(?=b)"}')
    assert "pattern a(?=b) is not supported" in call(capsys, *pattern).err
    with (
        hybridgen_gguf.load(str(tiny), n_ctx=256, threads=1, threads_batch=1) as model,
        pytest.warns(UserWarning) as warned,
    ):
        model.generate("hi", json_schema=schema, max_tokens=1)
    assert any("minimum at #/properties/a has no effect" in str(warning.message) for warning in warned)


@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"type": "integer", "minimum": 1, "multipleOf": 2}, ["multipleOf at #"]),
        ({"type": ["integer", "null"], "minimum": 1, "title": "x"}, []),
        ({"anyOf": [{"type": "null"}], "properties": {}}, ["properties at #"]),
        ({"type": "string", "format": "email"}, ["format email at #"]),
        ({"type": "array", "maxItems": 5000, "items": True}, ["maxItems 5000 (above 2000) at #"]),
        ({"type": "object", "patternProperties": {}}, ["patternProperties at #"]),
        ({"enum": [1], "description": "one"}, []),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_schema_loses(schema: dict[str, Any], lost: list[str]) -> None:
    assert list(prepared(json.dumps(schema))[1]) == lost


def test_references_get_names_of_their_own() -> None:
    names = {"a": "#/$defs/甲", "b": "#/$defs/乙", "c": "#", "d": "#/x~1y/1"}
    schema = {
        "properties": {key: {"$ref": name} for key, name in names.items()},
        "$defs": {"甲": {"const": 1}, "乙": {"const": 2}}, "x/y": [1, {"const": 3}],
    }  # fmt: skip
    made = json.loads(prepared(json.dumps(schema))[0])
    given = [made["properties"][key]["$ref"].rsplit("/", 1)[1] for key in "abcd"]
    assert len(set(given)) == 4
    assert [made["$defs"][name].get("const") for name in given] == [1, 2, None, 3]


@given(st.text(max_size=40))
def test_token_elements_are_told_from_characters(text: str) -> None:
    quoted = json.dumps(text, ensure_ascii=True)
    assert not names_tokens(f"root ::= {quoted} # <x>") and names_tokens(f"root ::= {quoted} <x>")


def test_no_memory_is_kept(tiny: Path) -> None:
    """Grammars of many requests are freed."""
    import resource

    grammar = "root ::= " + " | ".join(f'"{n} words" [a-z]{{1,50}}' for n in range(200))
    with hybridgen_gguf.load(str(tiny), n_ctx=256, threads=1, threads_batch=1) as model:
        for round_ in range(120):
            model.generate("hi", grammar=grammar, max_tokens=1)
            if round_ == 20:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 << 10, f"{grown} KiB"


def test_patterns_of_schemas(tiny: Path) -> None:
    """A pattern of a regular expression holds for what is written."""
    schema = {"type": "string", "pattern": "^[a-c]{2}-(x|yz)$"}
    with hybridgen_gguf.load(str(tiny), n_ctx=256, threads=1, threads_batch=1) as model:
        for seed in range(5):
            text = model.generate("hi", json_schema=schema, seed=seed).text
            assert re.fullmatch(r'"[a-c]{2}-(x|yz)"', text), text


# --- models that think ---

THINKS = "{{ messages[0].content }}{% if add_generation_prompt %}\n<think>\n{% endif %}"
MAY_THINK = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
YES = 'root ::= "yes" | "no"'


def asked(path: Path, **changes: Any) -> hybridgen_gguf.reply.Reply:
    with hybridgen_gguf.load(str(path), n_ctx=256, threads=1, threads_batch=1) as model:
        return model.chat([{"role": "user", "content": "hi"}], grammar=YES, seed=1, **changes)


def test_thoughts_are_free_and_the_answer_is_held(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "thinks.gguf", template=THINKS)
    reply = asked(path, reasoning_budget=5)
    assert reply.text in ("yes", "no") and reply.finish_reason == "stop"
    assert reply.reasoning and reply.reasoning not in ("yes", "no")
    assert asked(path, reasoning_budget=0).text in ("yes", "no")


def test_a_model_may_begin_to_think_by_itself(tmp_path: Path) -> None:
    """Where the mark is one token, it may come first although the grammar has no place for it."""
    path = tinygguf.build(tmp_path / "may.gguf", template=MAY_THINK, extra=["<think>", "</think>"])
    with Model(path, ModelSettings(), vocab_only=True) as model:
        opening = next(t for t in range(model.n_vocab) if model.token_text(t) == "<think>")
    reply = asked(path, reasoning_budget=3, logit_bias=((opening, 1000.0),))
    assert reply.tokens[0] == opening and reply.text in ("yes", "no") and reply.reasoning is not None
    without = asked(path, logit_bias=((opening, -float("inf")),))
    assert without.text in ("yes", "no") and not without.reasoning


def test_a_mark_of_several_tokens_leaves_no_room_for_thoughts(tmp_path: Path) -> None:
    reply = asked(tinygguf.build(tmp_path / "bytes.gguf", template=MAY_THINK))
    assert reply.text in ("yes", "no") and not reply.reasoning


class Prefixes:
    """Rules of a few words, a byte a token."""

    n_vocab = 300

    def __init__(self, *words: str) -> None:
        self.words, self.text = words, ""

    @property
    def finished(self) -> bool:
        return self.text in self.words

    def allowed(self, ids: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        every = np.arange(self.n_vocab) if ids is None else ids
        return np.array([token < 256 and self._fits(self.text + chr(token)) for token in every])

    def _fits(self, text: str) -> bool:
        return any(word.startswith(text) for word in self.words)

    def accept(self, token: int) -> None:
        self.accept_text(chr(token))

    def accept_text(self, text: str) -> None:
        if not self._fits(self.text + text):
            raise SampleError("does not fit the grammar")
        self.text += text


def test_the_end_of_thoughts_and_the_answers_beginning_in_one_token() -> None:
    """The token behind the mark is held against the grammar, white space before the answer is not."""
    pieces = {1: b"thought", 2: b"</think>\n\nye", 3: b"s", 4: b"</think>no, "}
    for last, fits in ((2, True), (4, False)):
        stream = AnswerStream(lambda token, **_: pieces[token], (), KNOWN[0], inside=True)
        guard = Guard(Prefixes("yes"), control=(), ends=(299,))
        assert guard.now(stream) is None
        stream.push(1)
        assert guard.now(stream) is None
        stream.push(last)
        if not fits:
            with pytest.raises(SampleError, match="does not fit"):
                guard.now(stream)
            continue
        assert guard.now(stream) is guard
        assert np.flatnonzero(guard.allowed(None)).tolist() == [ord("s")]
        guard.take(ord("s"))
        assert np.flatnonzero(guard.allowed(None)).tolist() == [299] and not guard.over()


def test_a_header_of_the_template_before_the_answer_is_free() -> None:
    """Harmony: the answer begins behind its own header."""
    harmony = KNOWN[-1]
    stream = AnswerStream(lambda token, **_: bytes([token]), (), harmony)
    guard = Guard(Prefixes("yes"), control=(), ends=(299,))
    for byte in b"<|channel|>final<|message|>":
        assert guard.now(stream) is None
        stream.push(byte)
    assert guard.now(stream) is guard
