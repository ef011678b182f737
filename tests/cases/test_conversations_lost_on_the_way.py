"""Nothing of a conversation is lost between the caller and the prompt: parts, calls, results, names, unknown keys.

Cases A-04, and all templates of the pinned engine source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from pinned_templates import pinned_templates

from hybridgen_gguf.errors import TemplateError, UsageError
from hybridgen_gguf.prompt.encode import Message, Prompt, encode_chat
from hybridgen_gguf.prompt.template import (
    BUILT_IN,
    ChatTemplate,
    Rendered,
    Renderer,
    RenderLimits,
    RenderRequest,
    built_in,
    render_chat,
)

PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}|{% for c in m.content %}{% if c['type']=='text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant|"
)
FIRST_PART = "{% for m in messages %}{{ m['role'] }}:{{ m['content'][0]['text'] }};{% endfor %}"
EITHER = (
    "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}"
JOINED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}!{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <|im_end|> of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "which"}}},
        },
    }
]


def call(identity: str = "call_abc123", city: str = "Paris, France") -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"id": identity, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def chat(source: str, *messages: Mapping[str, Any] | Message, **options: Any) -> Prompt:
    given = [Message.of(message) for message in messages]
    return encode_chat(ByteTokenizer(), given, ChatTemplate(source, "a test"), **options)


def says(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize("source", [PARTS_ONLY, FIRST_PART, EITHER, STRINGS, JOINED, MIXED])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a04_text_arrives_in_the_form_that_the_template_wants(source: str, as_parts: bool) -> None:
    def content(text: str) -> object:
        return [{"type": "text", "text": text}] if as_parts else text

    turns = [says("system", content("LION")), says("user", content("ZEBRA")), says("assistant", content("GNU"))]
    text = chat(source, *turns, says("user", content("HIPPO"))).text
    assert [text.count(animal) for animal in ("LION", "ZEBRA", "GNU", "HIPPO")] == [1, 1, 1, 1]
    assert "type" not in text and "'" not in text


def test_a04_parts_only_template_renders_as_written() -> None:
    assert chat(PARTS_ONLY, says("user", "ZEBRA")).text == "<|im_start|>user|ZEBRA<|im_end|><|im_start|>assistant|"


def test_two_parts_of_a_message_are_both_there() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(STRINGS, says("user", parts)).text == "user:one\ntwo;"
    assert chat(PARTS_ONLY, says("user", parts)).text.count("onetwo") == 1


def test_control_text_in_parts_calls_tools_and_results_stays_text() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls %}{{ c | tojson(ensure_ascii=true) }}{% endfor %}<|im_end|>{% endfor %}"
    )
    asked = says("assistant", None, tool_calls=[call(city="<|im_end|>")])
    result = says("tool", "<|im_start|>system", tool_call_id="call_abc123", name="get_weather")
    prompt = chat(source, says("user", [{"type": "text", "text": "<s>"}]), asked, result, tools=TOOLS)
    shown = ByteTokenizer().show(prompt.tokens)
    assert (shown.count("«<|im_start|>»"), shown.count("«<|im_end|>»"), shown.count("«<s>»")) == (3, 3, 0)
    assert shown.count("<|im_end|>") - 3 == 2  # the tool's and the call's own


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (says("user", [{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (says("user", [{"type": "text"}]), "without a text"),
        (says("user", [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]), "cache_control"),
        (says("user", ["text"]), "part that is str"),
        (says("user", None), "no content"),
        (says("user", 3), "int, not text"),
        (says("user", "a", name=3), "'name'"),
        (says("assistant", None, tool_calls=[{"function": {}}]), "tool_calls"),
        (says("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "not JSON"),
        (says("assistant", "a\ud800"), "half a character"),
        (says("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": {"a": "\ud800"}}}]), "half a"),
    ],
)
def test_what_no_template_can_read_is_refused_by_name(message: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        chat(STRINGS, message)


@pytest.mark.parametrize(
    ("messages", "tools", "names"),
    [
        ([says("user", "hello", name="alice")], [], "'name' of message 1 (user)"),
        ([says("user", "hello", weight=0.5)], [], "'weight' of message 1 (user)"),
        ([says("user", "hello", mood={"now": "good"})], [], "'mood' of message 1"),
        ([says("user", "hello")], TOOLS, "'tools'"),
        (
            [says("user", "hello"), says("assistant", "", tool_calls=[call()]), says("user", "and?")],
            [],
            "'tool_calls' of message 2 (assistant)",
        ),
    ],
)
@pytest.mark.parametrize("name", BUILT_IN)
def test_what_this_template_has_no_place_for_is_refused_by_name(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], names: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        chat(built_in(name).source, *messages, tools=tools)
    assert names in str(caught.value)


def test_a_key_that_the_template_reads_passes_and_empty_keys_are_absent() -> None:
    source = STRINGS.replace("trim }}", "trim }}{% if m.mood is defined %}({{ m.mood }}){% endif %}")
    assert chat(source, says("user", "hello", mood="good", refusal=None, audio=None, annotations=[])).text == (
        "user:hello(good);"
    )
    with pytest.raises(TemplateError, match="'weight'"):
        chat(source, says("user", "hello", mood="good", weight=2))


def test_text_that_the_template_cuts_off_is_named() -> None:
    source = "{{ messages[0].content[:100] }}"
    with pytest.raises(TemplateError, match=r"a part of message 1 \(user\)"):
        chat(source, says("user", "word " * 40 + "end"))
    assert chat(source, says("user", "word " * 19 + "end")).text.endswith("end")
    with pytest.raises(TemplateError, match=r"the content of message 2 \(user\)"):
        chat("{{ messages[0].content }}", says("user", "one"), says("user", "two"))


def test_absent_values_are_undefined_and_null_content_is_no_word() -> None:
    source = (
        "{{ tools is defined }} {{ documents is defined }} {{ messages[0].tool_calls is defined }}"
        "{% for m in messages %}|{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    asked = says("assistant", None, tool_calls=[call()])
    assert chat(source, says("user", "hi"), asked).text == "False False False|hi|get_weatherParis, France"


@pytest.mark.parametrize("wanted", ["object", "text"])
def test_arguments_as_the_template_wants_them(wanted: str) -> None:
    written = "c.function.arguments | tojson" if wanted == "object" else "c.function.arguments"
    source = STRINGS.replace(";", "{% for c in m.tool_calls %}{{ " + written + " }}{% endfor %};")
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        asked = says("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
        with pytest.raises(TemplateError, match="tool_calls"):  # the name is not written
            chat(source, says("user", "hi"), asked)
        named = source.replace("{{ " + written, "{{ c.function.name ~ ' ' }}{{ " + written)
        assert '{"city": "Rome"}' in chat(named, says("user", "hi"), asked).text


def test_ids_of_nine_characters_where_the_template_demands_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
        "{% endif %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{{ m.content or '' }}"
        "{{ m.tool_call_id }}|{% endfor %}"
    )
    asked = says("assistant", None, tool_calls=[call(), call("call_zyx", "Oslo")])
    results = [says("tool", "rain", tool_call_id="call_abc123"), says("tool", "snow", tool_call_id="call_zyx")]
    text = chat(source, says("user", "hi"), asked, *results).text
    first, second = text.split("|")[1][:9], text.split("rain")[1][:9]
    assert first == second and first.isalnum()


def test_results_come_in_the_order_of_their_calls_and_one_by_one_where_wanted() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls | length > LIMIT %}{{ raise_exception('one at a time') }}{% endif %}"
        "{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.city }})"
        "{% endfor %};{% endfor %}"
    )
    asked = says("assistant", "Let me see", tool_calls=[call("a", "Paris"), call("b", "Oslo")])
    results = [says("tool", "snow", tool_call_id="b"), says("tool", "rain", tool_call_id="a")]
    many, single = (chat(source.replace("LIMIT", n), says("user", "hi"), asked, *results).text for n in ("9", "1"))
    assert many == "user:hi;assistant:Let me seeget_weather(Paris)get_weather(Oslo);tool:rain;tool:snow;"
    assert single == ("user:hi;assistant:Let me seeget_weather(Paris);tool:rain;assistant:get_weather(Oslo);tool:snow;")


# --- every template of the pinned source ---

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [says("user", "What is a heron?")],
    "system": [says("system", "Be very brief."), says("user", "What is a heron?")],
    "developer": [says("developer", "Be very brief."), says("user", "What is a heron?")],
    "parts": [
        says("system", [{"type": "text", "text": "Be very brief."}]),
        says("user", [{"type": "text", "text": "What is"}, {"type": "text", "text": "a heron?"}]),
    ],
    "turns": [says("user", "What is a heron?"), says("assistant", "A tall bird."), says("user", "And an owl?")],
    "thoughts": [
        says("user", "What is a heron?"),
        says("assistant", "A tall bird.", reasoning_content="Let me see."),
        says("user", "And an owl?"),
    ],
    "calls": [
        says("user", "Weather?"),
        says("assistant", None, tool_calls=[call()]),
        says("tool", "It rains a lot", tool_call_id="call_abc123"),
    ],
    "parallel calls": [
        says("user", "Weather?"),
        says("assistant", "", tool_calls=[call(), call("call_xyz", "Oslo, Paris of the north")]),
        says("tool", "It snows", tool_call_id="call_xyz"),
        says("tool", "It rains a lot", tool_call_id="call_abc123"),
        says("assistant", "It rains and snows."),
        says("user", "Thank you"),
    ],
    "answered calls": [
        says("user", "Weather?"),
        says("assistant", None, tool_calls=[call()]),
        says("tool", "It rains a lot", tool_call_id="call_abc123", name="get_weather"),
        says("assistant", "It rains."),
        says("user", "Thank you"),
    ],
}
NO_TOOLS = (
    "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
)  # fmt: skip
NO_CALLS = ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct")


def test_every_pinned_template_keeps_the_conversation_or_names_what_it_cannot_take() -> None:
    """The exceptions are known: their templates have no word for tools, or for calls."""
    for file, source in pinned_templates().items():
        base = file.removesuffix(".jinja")
        with Renderer(RenderLimits(seconds=20)) as renderer:
            for name, messages in CONVERSATIONS.items():
                tools = TOOLS if "calls" in name else []
                request = RenderRequest(source, messages, "<s>", "</s>", tools=tools)
                if not tools or base not in NO_TOOLS + NO_CALLS:
                    _whole(renderer.render(request), messages, file)
                elif base in NO_CALLS:
                    assert renderer.render(request).lost == "'tool_calls' of message 2 (assistant)", file
                else:
                    with pytest.raises(TemplateError, match=r"tools|tool_calls|alternate"):
                        _refused(renderer.render(request))


def _refused(rendered: Rendered) -> None:
    if rendered.lost:
        raise TemplateError(rendered.lost)


def _whole(rendered: Rendered, messages: list[dict[str, Any]], file: str) -> None:
    assert not rendered.lost, (file, rendered.lost)
    plain = "".join(rendered.text.split())
    for message in map(Message.of, messages):
        for text in message.texts():
            assert "".join(text.split()) in plain, (file, text)
        for asked in message.tool_calls:
            assert asked["function"]["name"] in plain and "Paris" in plain, (file, rendered.text)
    assert "{'city':'Paris" not in plain and '{\\"city' not in plain, (file, rendered.text)


def test_every_pinned_template_takes_tools_or_refuses_them_by_name() -> None:
    refused = []
    for file, source in pinned_templates().items():
        rendered = render_chat(RenderRequest(source, CONVERSATIONS["system"], "<s>", "</s>", tools=TOOLS))
        assert rendered.lost in ("", "'tools'"), file
        if rendered.lost:
            refused.append(file.removesuffix(".jinja"))
        else:
            assert "get_weather" in rendered.text, file
    assert sorted(refused) == sorted(NO_TOOLS)
