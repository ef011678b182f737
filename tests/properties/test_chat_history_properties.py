"""Random conversations against every template of the pinned source: rendered whole or refused in a line; no crash.

A long search: scripts/dev/fuzz.
"""

from __future__ import annotations

import html
import json
import os
from typing import Any

from byte_tokenizer import CONTROL, ByteTokenizer
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pinned_templates import pinned_templates

from hybridgen_gguf.errors import TemplateError
from hybridgen_gguf.prompt.encode import Message, encode_chat
from hybridgen_gguf.prompt.renderer import Renderer, RenderLimits
from hybridgen_gguf.prompt.template import BUILT_IN, ChatTemplate, built_in

EXAMPLES = int(os.environ.get("HGGUF_FUZZ_EXAMPLES", "60"))
WORDS = [
    *CONTROL,
    "heron",
    "漢字",
    "😀",
    '"quoted"',
    "it's",
    "{{ 7*7 }}",
    "{% raw %}",
    "\\n",
    "<b>",
    "&amp;",
    "None",
    "a",
]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)
CONTENTS = st.one_of(
    TEXTS, st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: [{"type": "text", "text": t} for t in texts])
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "the word"}}},
    },
}


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system message perhaps, then turns; some answers call a tool and get a result."""
    found: list[dict[str, Any]] = []
    if draw(st.booleans()):
        found.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(CONTENTS)})
    for turn in range(draw(st.integers(0, 2))):
        found.append({"role": "user", "content": draw(CONTENTS)})
        if draw(st.booleans()):
            arguments: Any = {"word": draw(TEXTS)}
            arguments = json.dumps(arguments) if draw(st.booleans()) else arguments
            identity = f"call_{turn}"
            calls = [{"id": identity, "type": "function", "function": {"name": "look_up", "arguments": arguments}}]
            said = draw(st.sampled_from([None, ""]))
            found.append({"role": "assistant", "content": said, "tool_calls": calls})
            found.append({"role": "tool", "tool_call_id": identity, "name": "look_up", "content": draw(TEXTS)})
        answer = {"role": "assistant", "content": draw(CONTENTS)}
        found.append(answer | ({"reasoning_content": draw(TEXTS)} if draw(st.booleans()) else {}))
    found.append({"role": "user", "content": draw(CONTENTS)})
    return found


def squeezed(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.data())
def test_nothing_is_lost_and_nothing_breaks(history: list[dict[str, Any]], data: st.DataObject) -> None:
    sources = {**pinned_templates(), **{name: built_in(name).source for name in BUILT_IN}}
    name = data.draw(st.sampled_from(sorted(sources)))
    messages = [Message.of(message) for message in history]
    tools = [TOOL] if any(message.tool_calls for message in messages) else []
    template, limits = ChatTemplate(sources[name], "a test"), RenderLimits(seconds=20)
    tokenizer = ByteTokenizer()
    try:
        prompt = encode_chat(tokenizer, messages, template, tools=tools, renderer=Renderer(limits))
    except TemplateError as error:
        assert "\n" not in str(error)
        event(f"refused: {error.what[:40]}")
        return
    plain = squeezed(prompt.text)
    for message in messages:
        kept = message.role != "assistant"
        for text in message.texts() if kept else ():
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], html.escape(text))
            assert any(squeezed(form) in plain for form in forms), (name, message.role, text, prompt.text)
    if tools:
        assert "look_up" in prompt.text
    harmless = [_harmless(message) for message in messages]
    other = encode_chat(tokenizer, harmless, template, tools=tools, renderer=Renderer(limits))
    counts = [sum(token >= 1000 for token in made.tokens) for made in (prompt, other)]
    assert counts[0] == counts[1], (name, prompt.text)


def _harmless(message: Message) -> Message:
    """The message with every text replaced by one of the same kind that spells no control token."""

    def other(value: Any) -> Any:
        if isinstance(value, str):
            for spelled in CONTROL:
                value = value.replace(spelled, "x")
            return value
        if isinstance(value, dict):
            return {key: other(item) for key, item in value.items()}
        return [other(item) for item in value] if isinstance(value, (list, tuple)) else value

    return Message(
        message.role, other(message.content), other(message.tool_calls), message.tool_call_id, message.name,
        other(message.reasoning),
    )  # fmt: skip
