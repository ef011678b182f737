"""Thoughts apart from answers, found from the template; end tokens by the template. Cases A-07 and A-08."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import call, refused, spawn
from pinned_templates import pinned_templates
from tinygguf import build

import hybridgen_gguf
from hybridgen_gguf.engine.fake import BOS, EOS, FakeContext, FakeModel
from hybridgen_gguf.generate import LanguageModel, Reply
from hybridgen_gguf.plan import KvPlan, Plan
from hybridgen_gguf.prompt.probes import thoughts_open
from hybridgen_gguf.prompt.renderer import Renderer, RenderLimits, RenderRequest
from hybridgen_gguf.settings import ContextSettings, ModelSettings

PLAN = Plan(
    ModelSettings(), ContextSettings(512, n_batch=64, n_ubatch=64), n_layers=1, kv=KvPlan(0, 512, 0),
)  # fmt: skip
MENTIONS = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
OPENS = "{{ messages[0].content }}\n<think>\n"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}{% if m.thinking %}<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CONTROL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|turn_end|>", "[THINK]", "[/THINK]")


class ControlModel(FakeModel):
    """Bytes, and control tokens from 258 on that only `special` spells; the engine ends at EOS alone."""

    n_vocab = 258 + len(CONTROL)

    def token_text(self, token: int) -> str:
        return CONTROL[token - 258] if token >= 258 else super().token_text(token)

    def control_tokens(self) -> dict[str, int]:
        return {"<s>": BOS, "</s>": EOS} | {text: 258 + i for i, text in enumerate(CONTROL)}

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        ids = [BOS] * add_special
        while text:
            spelled = next((c for c in CONTROL if parse_special and text.startswith(c.encode())), None)
            ids.append(258 + CONTROL.index(spelled) if spelled else text[0])
            text = text[len(spelled.encode()) if spelled else 1 :]
        return ids


class Script(FakeContext):
    """Writes a script of tokens, whatever is fed to it."""

    def logits(self) -> Any:
        import numpy as np

        written = len(self.tokens) - self.prompt_end
        logits = np.zeros(ControlModel.n_vocab, np.float32)
        logits[self.script[min(written, len(self.script) - 1)]] = 50.0
        return logits


def model_that_writes(text: str, template: str | None) -> LanguageModel:
    model = ControlModel()
    context = Script(b"", 512)
    context.script = [*model.tokenize(text.encode(), False, True), EOS]
    opened: Any = SimpleNamespace(
        plan=PLAN, model=model, context=context, vocabulary=model, load_s=0.5, close=lambda: None,
        device_sample=lambda count, probabilities: None, shape=SimpleNamespace(chat_template=template),
    )  # fmt: skip
    return LanguageModel(opened)


def ask(text: str, template: str | None, **options: Any) -> Reply:
    return model_that_writes(text, template).chat([{"role": "user", "content": "hi"}], temperature=0, **options)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "written", "thoughts", "answer"),
    [
        (MENTIONS, "<think>x</think>y", "x", "y"),
        (MENTIONS, "\n<think>\nx\n\nz</think>\n\ny\n", "x\n\nz", "y\n"),
        (OPENS, "x</think>y", "x", "y"),
        (OPENS, "x", "x", ""),
        (QWEN, "<think>\nx\n</think>\n\ny", "x", "y"),
        (QWEN, "y", "", "y"),
        (HARMONY, f"<|channel|>analysis<|message|>x<|end|>{FINAL}y<|return|>z", "x", "y"),
        (HARMONY, f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}y", "a\nb", "y"),
        (HARMONY, "<|channel|>final<|message|>y<|return|>", "", "y"),
        (HARMONY, "<|channel|>analysis<|message|>x", "x", ""),
        ("{{ messages[0].content }}[/INST]{# [THINK] [/THINK] #}", "[THINK]x[/THINK]y", "x", "y"),
        # A text that merely mentions the marks
        (MENTIONS, "Use <think>x</think> tags", "", "Use <think>x</think> tags"),
        (MENTIONS, "x</think>y", "", "x</think>y"),
        (MENTIONS, "<thin", "", "<thin"),
        (QWEN, "<think>\nx\n</think>\n\ny <think>z</think>", "x", "y <think>z</think>"),
        (QWEN, " y", "", " y"),
        (QWEN, "<think>漢字😀</think>é", "漢字😀", "é"),
    ],
)  # fmt: skip
def test_a07_thoughts_and_answer_are_apart(template: str, written: str, thoughts: str, answer: str) -> None:
    chunks = list(model_that_writes(written, template).stream_chat([{"role": "user", "content": "hi"}], temperature=0))
    reply = chunks[-1].reply
    assert reply is not None
    assert (reply.reasoning, reply.text) == (thoughts, answer)
    assert "".join(chunk.reasoning for chunk in chunks) == thoughts
    assert "".join(chunk.text for chunk in chunks) == answer
    assert reply.message.content == answer and reply.as_json()["reasoning"] == thoughts


def test_a07_the_limit_cuts_the_thoughts() -> None:
    reply = ask("<think>\nabcdef</think>y", QWEN, max_tokens=11)
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("abc", "", "length")


def test_formats_that_keep_thoughts_in_the_text() -> None:
    written = "[THINK]x[/THINK]y"
    template = "{{ messages[0].content }}[/INST]{# [THINK] [/THINK] #}"
    kept = ask(written, template, reasoning_format="none")
    assert (kept.text, kept.reasoning, kept.message.content) == (written, None, "y")
    both = ask(written, template, reasoning_format="deepseek-legacy")
    assert (both.text, both.reasoning, both.message.content) == (written, "x", "y")
    assert "reasoning" not in model_that_writes("<think>x</think>y", MENTIONS).generate("hi", temperature=0).as_json()


def test_stop_strings_end_the_answer_and_not_the_thoughts() -> None:
    reply = ask("<think>one STOP two</think>three STOP four", QWEN, stop=["STOP"])
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("one STOP two", "three ", "stop")


@pytest.mark.parametrize(
    ("template", "written", "budget", "forced"),
    [
        (QWEN, "<think>\nabcdefgh", 3, "\n</think>\n\n"),
        (QWEN, "<think>\nabcdefgh", 0, "\n</think>\n\n"),
        (OPENS, "abcdefgh", 2, "\n</think>\n\n"),
        (HARMONY, "<|channel|>analysis<|message|>abcdefgh", 2, f"<|end|>{FINAL}"),
        (QWEN, "<think>漢漢漢", 2, "\n</think>\n\n"),  # never inside a character
    ],
)
def test_budget_ends_thoughts_in_the_models_own_way(template: str, written: str, budget: int, forced: str) -> None:
    model = model_that_writes(written + "z" * 60, template)
    reply = model.chat(
        [{"role": "user", "content": "hi"}], temperature=0, reasoning_budget=budget, max_tokens=90, logprobs=1
    )
    spelled = ControlModel().tokenize(forced.encode(), False, True)
    at = next(i for i in range(len(reply.tokens)) if list(reply.tokens[i : i + len(spelled)]) == spelled)
    assert reply.reasoning is not None and "\ufffd" not in reply.reasoning
    assert len(reply.reasoning.encode()) <= budget + 2
    assert at >= budget
    assert len(reply.logprobs) == len(reply.tokens)
    assert all(d.token == t and d.logprob is not None for d, t in zip(reply.logprobs, reply.tokens, strict=True))
    assert reply.text.endswith("z")


def test_off_without_a_switch_leaves_no_thoughts() -> None:
    assert ask("abc</think>y", OPENS, reasoning=False, max_tokens=40).reasoning == ""


def test_switch_of_the_template_is_found() -> None:
    model = model_that_writes("y", MENTIONS)
    messages = [{"role": "user", "content": "hi"}]
    assert model.encode(None, messages).text == "hi"
    assert model.encode(None, messages, reasoning=False).text == "hi<think></think>"
    assert model.encode(None, messages, template_kwargs={"enable_thinking": False}).text == "hi<think></think>"
    with pytest.warns(UserWarning, match="no switch for thinking"):
        model_that_writes("y", "{{ messages[0].content }}").encode(None, messages, reasoning=True)
    with pytest.warns(UserWarning, match="does not know 'nonsense'"):
        model.encode(None, messages, template_kwargs={"nonsense": 1})


OPENING = {  # what the pinned templates' models write around thoughts; every other template marks none
    "Apertus-8B-Instruct": "<|inner_prefix|>",
    "Apriel-1.6-15b-Thinker-fixed": "<|begin_assistant|>",
    "ByteDance-Seed-OSS": "<seed:think>",
    "Cohere2MoE": "<|START_THINKING|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|START_THINKING|>",
    "Kimi-K3": "<|open|>think<|sep|>",
    "MiniMax-M3": "<mm:think>",
    "google-gemma-4-31B-it": "<|channel>thought",
    "google-gemma-4-31B-it-interleaved": "<|channel>thought",
    "mistralai-Ministral-3-14B-Reasoning-2512": "[THINK]",
    "muse-glimmer": "to=self<|message|>",
    "openai-gpt-oss-120b": "<|channel|>analysis<|message|>",
    "tencent-Hy3": "<think:opensource>",
    "unsloth-Apriel-1.5": "<thinking>",
    "upstage-Solar-Open-100B": "<|think|>",
}
NONE = (
    "CohereForAI-c4ai-command-r-plus-tool_use", "GigaChat3", "Kimi-K2-Instruct", "LFM2-8B", "MiMo", "MiniMax-M1",
    "Mistral-Small", "NousResearch", "Qwen-Qwen2.5", "Qwen3-Coder", "fireworks", "google-gemma-2",
    "ibm-granite-granite-4", "meetkai", "meta-llama", "microsoft-Phi", "mistralai-Mistral", "moonshotai",
    "unsloth-mistral",
)  # fmt: skip


def test_marks_of_every_pinned_template() -> None:
    for file, source in pinned_templates().items():
        name = file.removesuffix(".jinja")
        with Renderer(RenderLimits(seconds=20)) as renderer:
            request = RenderRequest(source, [{"role": "user", "content": "Hello there"}], "<s>", "</s>")
            rendered = renderer.render(request)
            style = renderer.style(request)
            assert style.ends or name == "llama-cpp-rwkv-world", name
            if name.startswith(NONE):
                assert style.marks is None, name
                continue
            assert style.marks is not None, name
            assert style.marks.open == OPENING.get(name, "<think>"), name
            closed = style.marks.close in rendered.tail.rpartition(style.marks.open)[2]
            assert thoughts_open(rendered.tail, style.marks) == (style.marks.open in rendered.tail and not closed), name
            if style.off:
                quiet = renderer.render(RenderRequest(**{**vars(request), "variables": style.off}))
                assert not thoughts_open(quiet.tail, style.marks), name


# --- end tokens ---

ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|turn_end|>{% endfor %}<|assistant|>"


def test_a08_the_templates_own_turn_end_ends_the_answer(engine: object, tmp_path: Path) -> None:
    path = build(tmp_path / "e1.gguf", ctx=512, extra=["<|turn_end|>"], template=ENDS)
    with hybridgen_gguf.load(str(path), n_ctx=256) as model:
        messages, bias = [{"role": "user", "content": "hi"}], ((259, 100.0),)
        reply = model.chat(messages, max_tokens=12, logit_bias=bias)
        assert (reply.tokens, reply.finish_reason) == ((), "stop")
        kept = model.chat(messages, max_tokens=3, logit_bias=bias, ignore_end=True)
        assert kept.tokens == (259, 259, 259)


def test_a08_the_end_of_thoughts_is_no_end_of_the_answer() -> None:
    assert ask(f"<|channel|>analysis<|message|>x<|end|>{FINAL}y<|end|>z<|return|>w", HARMONY).text == "yz"
    assert ask("a<|turn_end|>b", ENDS).text == "a"


def test_flags(engine: object, tmp_path: Path) -> None:
    path = build(tmp_path / "k.gguf", ctx=512, extra=["<think>", "</think>"], template=MENTIONS)
    start = ["run", str(path), "-c", "256", "-p", "hi", "-n", "6", "-l", "259+100"]
    document = spawn(*start, "--json").json
    assert document["text"] == "" and document["reasoning"] == "<think>" * 5
    shown = spawn(*start)
    assert shown.out == "\n" and "<think>" not in shown.err
    assert "<think><think>" in spawn(*start, "--reasoning-format", "deepseek").err
    assert spawn(*start, "--reasoning-format", "none").out == "<think>" * 6 + "\n"
    quiet = spawn(*start, "--json", "--chat-template-kwargs", '{"enable_thinking": false}').json
    assert quiet["usage"]["prompt_tokens"] > document["usage"]["prompt_tokens"]
    assert "marks no thoughts" in spawn(*start, "--chat-template", "chatml", "--reasoning-budget", "3").err


@pytest.mark.parametrize(
    "wrong",
    [
        ("--reasoning", "maybe"),
        ("--reasoning-budget", "-5"),
        ("--reasoning-format", "x"),
        ("--chat-template-kwargs", "[1]"),
        ("--chat-template-kwargs", '{"messages": 1}'),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]) -> None:
    refused(call(capsys, "run", "none.gguf", "-p", "hi", *wrong), 2, wrong[0])
