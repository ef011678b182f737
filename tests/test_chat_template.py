"""chat_template.py: which template, what it sees, and what a hostile one can cost."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from hybridgen_gguf.errors import BadFile, NotFound, TemplateError, UsageError
from hybridgen_gguf.prompt.template import (
    BUILT_IN,
    Renderer,
    RenderLimits,
    RenderRequest,
    built_in,
    choose_template,
    render_chat,
)

USER = [{"role": "user", "content": " Hi "}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
QUICK = RenderLimits(seconds=0.3, output_bytes=1 << 20, memory_bytes=64 << 20)


def text_of(source: str, messages: list[dict[str, str]] = USER, **options: object) -> str:
    return render_chat(RenderRequest(source, messages, "<s>", "</s>", **options)).text  # type: ignore[arg-type]


EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "Yes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes? </s><s>[INST] Bye [/INST]",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<|header_start|>system<|header_end|>\n\nBe brief.<|eot|><|header_start|>user<|header_end|>\n\nHi<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nYes?<|eot|><|header_start|>user<|header_end|>\n\nBye<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "mistral": "[INST] Be brief.\n\nHi[/INST] Yes?</s>[INST] Bye[/INST]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>Yes?<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>",
    "plain": "system: Be brief.\nuser: Hi\nassistant: Yes?\nuser: Bye\nassistant:",
    "vicuna": "Be brief.\n\nUSER: Hi\nASSISTANT: Yes?</s>\nUSER: Bye\nASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n"
    "<|user|>\nBye</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates(name: str) -> None:
    assert text_of(built_in(name).source, TURNS) == EXPECTED[name]


def test_plain_gives_a_single_user_message_as_it_is() -> None:
    assert text_of(built_in("plain").source) == " Hi "


def test_functions_and_filters_that_hub_templates_use() -> None:
    assert text_of("{{ {'b': '<漢>', 'a': 1} | tojson }}") == '{"b": "<漢>", "a": 1}'
    assert text_of("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert text_of("{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert text_of("{{ strftime_now('%Y') }}") >= "2025"
    assert text_of("{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "01"
    assert text_of("a{% generation %}{{ messages[0].content | trim }}{% endgeneration %}b") == "aHib"
    assert text_of("{{ tools is none }} {{ documents is none }} {{ bos_token }}{{ eos_token }}") == "True True <s></s>"
    assert text_of("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert text_of("{{ messages[0].missing }}|{{ messages[0]['role'] }}") == "|user"


def test_blocks_are_trimmed_as_on_the_hub() -> None:
    assert text_of("  {% if true %}\n  x\n  {% endif %}\ny\n") == "  x\ny"


def test_generation_prompt_can_be_left_out() -> None:
    source = built_in("chatml").source
    assert text_of(source, add_generation_prompt=False) == "<|im_start|>user\n Hi <|im_end|>\n"


def test_text_beyond_ascii_passes_unchanged() -> None:
    text = "漢字 😀 \x00 é\r\n\u2028"
    assert text_of("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [REFUSES_SYSTEM, DROPS_SYSTEM])
def test_system_message_moves_to_the_user_where_the_template_has_no_place_for_it(source: str) -> None:
    rendered = render_chat(RenderRequest(source, TURNS[:2]))
    assert rendered.text == "<user>Be brief.\n\nHi"
    assert rendered.system_folded


def test_other_refusals_are_reported_in_one_clean_line() -> None:
    with pytest.raises(TemplateError, match=r"refuses these messages: no \[31m way$") as caught:
        text_of("{{ raise_exception('no\n\x1b[31m way') }}", TURNS)
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in messages %}{{ m.content ", "does not parse: line 1"),
        ("{% nonsense %}", "does not parse"),
        ("{{ 1/0 }}", "fails: ZeroDivisionError"),
        ("{% include 'x' %}", "fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too deeply|ended with status"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{{ ''.__class__.__mro__ }}", "sandbox forbids"),
        ("x" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_broken_template(source: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        text_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 30000000000 }}",
        "{{ ('x' * 30000000000) | length }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ ['a' * 1000] * 1000000000 }}",
        "{{ (['a' * 1000] * 1000000) | join }}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ ('a' * 30) | replace('a', 'b' * 9999999) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_too_much_memory_or_text(source: str) -> None:
    with pytest.raises(TemplateError, match=r"more than [\d.]+ [KM]iB of|takes longer|too large"):
        render_chat(RenderRequest(source, USER), QUICK)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
        "{{ lipsum(n=1000000) }}",
        "{{ 10 ** 9999999 % 7 ** 9999999 }}",
        "{{ ('a' * 10000000) | wordwrap(1) | length }}",
    ],
)
def test_too_much_time(source: str) -> None:
    with pytest.raises(TemplateError, match=r"takes longer than 0\.3 s|writes more than"):
        render_chat(RenderRequest(source, USER), QUICK)


def test_template_cannot_reach_python_or_the_disk(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = f"touch {mark}"
    for way in (
        "{{ cycler.__init__.__globals__.os.popen('%s').read() }}",
        "{{ namespace.__init__.__globals__['os'].system('%s') }}",
        "{{ self._TemplateReference__context.environment.from_string('%s') }}",
        "{{ ''.__class__.__base__.__subclasses__() }}{# %s #}",
        "{{ (messages | attr('__class__')).__base__ }}{# %s #}",
        "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}{# %s #}",
        "{{ raise_exception.__globals__['os'] }}{# %s #}",
    ):
        with pytest.raises(TemplateError):
            text_of(way % command)
    assert not mark.exists()


def test_child_has_no_environment_and_cannot_write_files(tmp_path: Path) -> None:
    """What the limits leave to code that has got out of the sandbox."""
    child = Path(render_chat.__code__.co_filename).with_name("render_child.py")
    code = (
        f"import runpy\nm = runpy.run_path({str(child)!r})\nm['_set_limits'](5, 1 << 20)\n"
        f"try:\n open({str(tmp_path / 'f')!r}, 'wb', 0).write(b'x')\nexcept OSError as e:\n print('refused')\n"
        "try:\n bytearray(64 << 20)\nexcept MemoryError:\n print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "refused"], done.stderr


def test_renderer_started_early_and_closed_unused() -> None:
    with Renderer() as renderer:
        process = renderer._process
        assert process.poll() is None
    assert process.poll() is not None
    renderer.close()


def test_renderer_works_from_a_folder_with_foreign_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert text_of("{{ messages[0].content }}") == " Hi "


def test_large_conversation_passes_through_the_pipes() -> None:
    content = "漢" * 1_000_000
    assert text_of("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_variable_that_is_no_json_is_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match="JSON"):
        text_of("", variables={"x": object()})


def test_choice_of_template(tmp_path: Path) -> None:
    assert choose_template(None, "{{ x }}", {}).origin == "the model"
    assert choose_template("{{ y }}", "{{ x }}", {}).source == "{{ y }}"
    assert choose_template("chatml", "{{ x }}", {}).origin == "built-in chatml"
    file = tmp_path / "模板.jinja"
    file.write_text("{{ 漢 }}", encoding="utf-8")
    assert choose_template(str(file), None, {}).source == "{{ 漢 }}"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (("<|im_start|>", "<|im_end|>"), "chatml"),
        (("<|im_start|>",), "plain"),
        (("<start_of_turn>", "<end_of_turn>"), "plain"),  # in the vocabulary of Gemma's base models too
        (("<s>",), "plain"),
    ],
)
@pytest.mark.parametrize("of_model", [None, "  "])
def test_model_without_a_template(tokens: tuple[str, ...], name: str, of_model: str | None) -> None:
    assert choose_template(None, of_model, tokens).origin == f"built-in {name}"


def test_choice_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        choose_template("chatlm", None, {})
    assert caught.value.hint == "did you mean chatml?"
    with pytest.raises(NotFound):
        choose_template(str(tmp_path / "none.jinja"), None, {})
    with pytest.raises(NotFound):
        choose_template("none.jinja", None, {})
    with pytest.raises(UsageError):
        choose_template("a\0b", None, {})
    binary = tmp_path / "model.gguf"
    binary.write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(BadFile, match="UTF-8"):
        choose_template(str(binary), None, {})
    binary.write_bytes(b"x" * (1 << 21))
    with pytest.raises(BadFile, match="larger"):
        choose_template(str(binary), None, {})


def test_child_ends_when_its_parent_goes_away_without_a_request() -> None:
    child = Path(render_chat.__code__.co_filename).with_name("render_child.py")
    folders = json.dumps([entry for entry in sys.path if entry])
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(child), folders], input=b"", capture_output=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout == b""
