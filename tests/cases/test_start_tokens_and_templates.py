"""One start token whoever adds it, and templates that attack (D-26, D-27)."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import ByteTokenizer

from hybridgen_gguf.errors import TemplateError
from hybridgen_gguf.prompt.encode import Message, Prompt, encode_chat, encode_raw
from hybridgen_gguf.prompt.template import ChatTemplate, Renderer, RenderLimits

CONTENT = "{{ messages[0]['content'] }}"


def chat(tokenizer: ByteTokenizer, source: str) -> Prompt:
    limits = RenderLimits(seconds=0.5)
    return encode_chat(
        tokenizer, [Message("user", "hello")], ChatTemplate(source, "the model"), renderer=Renderer(limits)
    )


@pytest.mark.parametrize("source", [CONTENT, "{{ bos_token }}" + CONTENT])
def test_d26_template_and_tokenizer_both_want_the_start_token(source: str) -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    assert tokenizer.show(chat(tokenizer, source).tokens) == "«<s>»hello"


@pytest.mark.parametrize("before", [" ", "\n\n", "x", "{{ bos_token }}"])
def test_d26_a_template_that_writes_it_late_or_twice(before: str) -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    shown = tokenizer.show(chat(tokenizer, before + "{{ bos_token }}" + CONTENT).tokens)
    assert shown == ("" if "bos" in before else before) + "«<s>»hello"


def test_d26_raw_prompt_that_begins_with_it() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    assert tokenizer.show(encode_raw(tokenizer, "<s>hello").tokens) == "«<s>»hello"


def test_d26_model_that_wants_none() -> None:
    tokenizer = ByteTokenizer(add_bos=False)
    assert tokenizer.show(chat(tokenizer, CONTENT).tokens) == "hello"
    assert tokenizer.show(encode_raw(tokenizer, "hello").tokens) == "hello"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}", "sandbox forbids"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", r"takes longer than 0\.5 s"),
        ("{{ 'x'*30000000000 }}", "more than 512 MiB of memory"),
        ("{% for m in messages %}{{ m.content ", "does not parse"),
        # Loops and recursion
        ("{% for a in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes longer"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "calls itself too deeply"),
        ("{% block a %}{{ self.a() }}{% endblock %}", "calls itself too deeply"),
        # What filters and formats blow up, and what is small for Jinja and long for a tokenizer
        ("{{ 'a' | indent(9999999999, true) }}", "memory"),
        ("{{ messages | tojson(indent=9999999999) }}", "memory"),
        ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}", "memory"),
        ("{{ strftime_now('%Y' * 1000000) }}", "writes more than"),
        ("{{ 'x' * 300000 }}", "writes more than"),
        ("{{ lipsum(n=1000000) }}", "takes longer"),
        ("{{ 10 ** 10000 }}", "fails"),
        # Ways to Python's objects
        ("{{ messages | map(attribute='__class__.__init__.__globals__') | list }}", "sandbox forbids"),
        ("{{ lipsum.__globals__['os'].system('touch MARK') }}", "sandbox forbids"),
        ("{{ (joiner, namespace)[0].__init__.__globals__ }}", "sandbox forbids"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "sandbox forbids"),
        ("{% set _ = messages[0].update({'content': 'evil'}) %}", "sandbox forbids"),
        # What is no text, or no template
        ("{{ '\\ud800' }}", "half a character"),
        ("{{ strftime_now('\\ud800') }}", "fails"),
        ("{% break %}", "fails"),
        ("{% include ['a', '/etc/passwd'] %}", "fails"),
    ],
)
def test_d27_attacks_end_in_one_line_and_raw_text_still_works(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = ByteTokenizer()
    with pytest.raises(TemplateError, match=says) as caught:
        chat(tokenizer, source)
    assert "\n" not in str(caught.value)
    assert "--raw" in caught.value.hint
    assert not list(tmp_path.iterdir())
    assert tokenizer.show(encode_raw(tokenizer, "hello").tokens) == "hello"
