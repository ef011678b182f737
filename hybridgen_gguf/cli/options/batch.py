"""Flags of the verbs that work through files: batch, score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .output import Json
from .prompt import PromptFlags
from .sample import SampleFlags
from .spread import argument, flag, plain, subset

LINES = "Lines"

Input = Annotated[str | None, argument("IN.jsonl", "The requests, a JSON object a line.")]
Output = Annotated[str | None, plain(LINES, "The file that the answers go to.", "-o", "--output", metavar="FILE")]
Resume = Annotated[bool, plain(LINES, "Go on where an interrupted run has left off.", "--resume")]
Parallel = Annotated[
    int, flag(LINES, "Requests that are answered at once.", "-np", "--parallel", llama="N_PARALLEL", metavar="N")
]
StepMs = Annotated[
    float,
    flag(LINES, "Milliseconds that a step may take: prompts wait for answers beyond that.", "--step-ms", metavar="MS"),
]
Quiet = Annotated[bool, plain(LINES, "No statistics on stderr.", "-q", "--quiet")]

#: how answers end and which template is used; the prompts come from the file
AnswerFlags = subset("AnswerFlags", PromptFlags, ("chat_template", "jinja", "predict", "stop", "ignore_eos"))
TemplateFlag = subset("TemplateFlag", PromptFlags, ("chat_template",))
_KEPT = tuple(name for name in SampleFlags.__dataclass_fields__ if name not in ("logprobs", "draws"))
#: what a line's body leaves open
DefaultSampleFlags = subset("DefaultSampleFlags", SampleFlags, _KEPT)


@dataclass(frozen=True)
class LineFlags:
    """Files, how many lines at once, and going on."""

    input: Input = None
    output: Output = None
    resume: Resume = False
    parallel: Parallel = 8
    step_ms: StepMs = 100.0
    json: Json = False
    quiet: Quiet = False


@dataclass(frozen=True)
class ScoreFlags:
    """What is judged."""

    labels: Annotated[
        str, plain(LINES, "The labels to compare, separated by commas.", "--labels", metavar="A,B,...")
    ] = "yes,no"
    prefix: Annotated[str | None, plain(LINES, "What stands before every text; it is read once.", "--prefix")] = None
    prefix_file: Annotated[
        str | None, plain(LINES, "Read the prefix from a UTF-8 file.", "--prefix-file", metavar="FILE")
    ] = None
    suffix: Annotated[str, plain(LINES, "What stands after every text, before the label.", "--suffix")] = ""
