"""Flags of the prompt, of thinking, and of the answer's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .spread import flag, plain

WRITE = "Prompt and answer"


@dataclass(frozen=True)
class PromptFlags:
    """What to ask and when to stop."""

    prompt: Annotated[str | None, plain(WRITE, "The prompt; - reads standard input.", "-p", "--prompt")] = None
    file: Annotated[str | None, plain(WRITE, "Read the prompt from a UTF-8 file.", "-f", "--file", metavar="FILE")] = (
        None
    )
    system: Annotated[str | None, plain(WRITE, "The system message.", "-sys", "--system-prompt")] = None
    raw: Annotated[bool, plain(WRITE, "Continue the text as it is, without the chat template.", "--raw")] = False
    chat_template: Annotated[
        str | None,
        flag(WRITE, "A built-in template's name, Jinja text, or a file.", "--chat-template", llama="CHAT_TEMPLATE"),
    ] = None
    jinja: Annotated[
        bool, flag(WRITE, "Accepted for llama.cpp's sake: templates are always Jinja.", "--jinja", llama="JINJA")
    ] = True
    predict: Annotated[
        int,
        flag(
            WRITE,
            "Most tokens to write; -1: until the model ends or the context is full.",
            "-n",
            "--predict",
            "--n-predict",
            llama="N_PREDICT",
        ),
    ] = -1
    stop: Annotated[
        list[str] | None,
        plain(
            WRITE,
            "End before this text (may be given several times).",
            "--stop",
            "-r",
            "--reverse-prompt",
            metavar="TEXT",
        ),
    ] = None
    ignore_eos: Annotated[bool, plain(WRITE, "Go on after the model's end token.", "--ignore-eos")] = False
    escape: Annotated[
        bool,
        plain(
            WRITE,
            r"Turn \n, \t, \xHH and the like in prompt, system message and stop texts into characters.",
            "-e",
            "--escape/--no-escape",
        ),
    ] = False
    grammar: Annotated[
        str | None, plain(WRITE, "The answer is a text of this grammar (GBNF).", "--grammar", metavar="GBNF")
    ] = None
    grammar_file: Annotated[
        str | None, plain(WRITE, "The same, read from a file.", "--grammar-file", metavar="FILE")
    ] = None
    json_schema: Annotated[
        str | None,
        plain(
            WRITE,
            "The answer is JSON of this schema; {} is any JSON. References to elsewhere are not fetched.",
            "-j",
            "--json-schema",
            metavar="SCHEMA",
        ),
    ] = None
    json_schema_file: Annotated[
        str | None, plain(WRITE, "The same, read from a file.", "-jf", "--json-schema-file", metavar="FILE")
    ] = None


@dataclass(frozen=True)
class ThinkFlags:
    """Whether and how long a model thinks, where its thoughts go, and variables for its chat template."""

    reasoning: Annotated[
        str,
        flag(
            WRITE,
            "Whether the model is to think; auto: as its template says.",
            "-rea",
            "--reasoning",
            llama="REASONING",
            metavar="on|off|auto",
        ),
    ] = "auto"
    reasoning_budget: Annotated[
        int,
        flag(
            WRITE,
            "Tokens of thinking before the answer must begin; -1: no limit.",
            "--reasoning-budget",
            llama="THINK_BUDGET",
        ),
    ] = -1
    reasoning_format: Annotated[
        str,
        flag(
            WRITE,
            "Thoughts: auto shows them dimmed on a terminal and leaves them out elsewhere; deepseek writes them to "
            "stderr instead of leaving them out; none keeps them in the answer; deepseek-legacy also in --json.",
            "--reasoning-format",
            llama="THINK",
            metavar="auto|none|deepseek|deepseek-legacy",
        ),
    ] = "auto"
    reasoning_effort: Annotated[
        str | None,
        flag(
            WRITE,
            "How much to think, for templates that take it.",
            "--reasoning-effort",
            llama="REASONING_EFFORT",
            metavar="low|medium|high|...",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        flag(
            WRITE,
            "Variables for the chat template, as a JSON object.",
            "--chat-template-kwargs",
            llama="CHAT_TEMPLATE_KWARGS",
            metavar="JSON",
        ),
    ] = None
