"""The command line: flags in, exit code out. Each verb is a few lines over the modules below.

Imports stay light, so that `--help` is quick: what a verb needs is imported inside it.
Invariant: nothing but the answer or the data reaches stdout, and every error is one line with a hint (errors.py).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer._click.exceptions import ClickException  # typer exports only some of its subclasses

from ..engine import giving_up, refusals
from ..errors import EngineError, HgError, UsageError
from . import endings, llama_flags, show, slips
from .options import (
    AnswerFlags,
    AttentionBenchFlags,
    BenchFlags,
    ConvertFlags,
    DefaultSampleFlags,
    DoctorFlags,
    ImatrixFlags,
    JsonFlag,
    LineFlags,
    ModelFlags,
    PlaceFlags,
    PlanOutput,
    ProfileFlags,
    PromptFlags,
    QuantizeFlags,
    ReadingFlags,
    ReportFlags,
    RunOutput,
    SampleFlags,
    ScoreFlags,
    TemplateFlag,
    ThinkFlags,
    TuneFlags,
    ValidateFlags,
    takes,
)

BENCH_ATTENTION = "bench attention"
_LIKE_LLAMA = (
    "run",
    "plan",
    "bench",
    "tune",
    "batch",
    "score",
)  # the verbs that take commands copied from llama.cpp's guides
app = typer.Typer(
    name="hgguf",
    help="Run GGUF models on a machine whose GPU is too small for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        show.answer(f"hgguf {__version__}\n")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="HGGUF_DEBUG", help="Tracebacks, and the engine's own log.")
    ] = False,
) -> None:
    from .config import read_config

    if debug:
        os.environ["HGGUF_DEBUG"] = "1"
    commands = getattr(context.command, "commands", {})
    context.default_map = read_config({name: _config_keys(command) for name, command in commands.items()})


def _config_keys(command: Any) -> dict[str, str]:
    """Key in the configuration file → parameter: a flag's long names, with `_` for `-`."""
    return {
        name.lstrip("-").replace("-", "_"): parameter.name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    }


@app.command()
@takes(model=ModelFlags, ask=PromptFlags, think=ThinkFlags, place=PlaceFlags, sampling=SampleFlags, output=RunOutput)
def run(
    model: ModelFlags,
    ask: PromptFlags,
    think: ThinkFlags,
    *,
    place: PlaceFlags,
    sampling: SampleFlags,
    output: RunOutput,
) -> int:
    """Answer one prompt, as it is written. Piped standard input is the prompt."""
    from .run import Asked, run_verb

    return run_verb(model.name(), Asked(ask, think, sampling), place, output)


@app.command()
@takes(model=ModelFlags, place=PlaceFlags, output=PlanOutput)
def plan(model: ModelFlags, place: PlaceFlags, output: PlanOutput) -> None:
    """What would lie and run where, and why. Nothing is loaded."""
    from .run import plan_verb

    plan_verb(model.name(), place, output)


@app.command()
@takes(model=ModelFlags, output=JsonFlag)
def inspect(model: ModelFlags, output: JsonFlag) -> None:
    """What a file holds: shape, tensors, metadata. Reads the header alone."""
    from .files import inspect_verb

    inspect_verb(model.name(), output.json)


@app.command()
@takes(flags=ValidateFlags)
def validate(flags: ValidateFlags) -> int:
    """Whether files are sound. Each is checked by the engine in a process of its own."""
    from .files import validate_verb

    return validate_verb(flags.files, flags.json, flags.check_tensors)


@app.command()
@takes(model=ModelFlags, output=JsonFlag)
def pull(model: ModelFlags, output: JsonFlag) -> None:
    """Fetch a model and check its digest. What is there already is not fetched again."""
    from .files import pull_verb

    pull_verb(model.name(), output.json)


@app.command()
@takes(output=JsonFlag)
def models(output: JsonFlag) -> None:
    """List the models that have a name here."""
    from .files import models_verb

    models_verb(output.json)


@app.command()
@takes(output=JsonFlag)
def engine(output: JsonFlag) -> None:
    """Which engine is used: its folder, commit, patches, switches, backends and devices."""
    from .files import engine_verb

    engine_verb(output.json)


@app.command()
@takes(model=ModelFlags, place=PlaceFlags, tests=BenchFlags)
def bench(model: ModelFlags, place: PlaceFlags, tests: BenchFlags) -> int:
    """Measure prefill and decode speed, as llama-bench does."""
    from .run import bench_verb

    return bench_verb(model.name(), place, tests)


@app.command(BENCH_ATTENTION)
@takes(flags=AttentionBenchFlags)
def bench_attention(flags: AttentionBenchFlags) -> None:
    """Measure CPU attention alone: time, bandwidth, error against float64; stock code beside ours."""
    from .bench import attention_verb

    attention_verb(flags)


@app.command()
@takes(
    model=ModelFlags,
    lines=LineFlags,
    answer=AnswerFlags,
    think=ThinkFlags,
    place=PlaceFlags,
    sampling=DefaultSampleFlags,
)
def batch(
    model: ModelFlags, lines: LineFlags, answer: Any, think: ThinkFlags, *, place: PlaceFlags, sampling: Any
) -> int:
    """Answer a file of requests, many at once. Lines as in OpenAI's batches."""
    from .batch import BatchAsked, batch_verb

    return batch_verb(model, lines, BatchAsked(answer, think, sampling), place)


@app.command()
@takes(model=ModelFlags, lines=LineFlags, judged=ScoreFlags, template=TemplateFlag, place=PlaceFlags)
def score(model: ModelFlags, lines: LineFlags, judged: ScoreFlags, template: Any, *, place: PlaceFlags) -> int:
    """Judge a file of texts: how likely each label is after each of them."""
    from .batch import score_verb

    return score_verb(model, lines, judged, place, template.chat_template)


@app.command()
@takes(flags=ProfileFlags)
def profile(flags: ProfileFlags) -> None:
    """Measure this machine with the engine's own kernels (10 to 20 s) and remember it."""
    from .measure import profile_verb

    profile_verb(flags)


@app.command()
@takes(model=ModelFlags, place=PlaceFlags, flags=TuneFlags)
def tune(model: ModelFlags, place: PlaceFlags, flags: TuneFlags) -> int:
    """Measure around the plan, find what is fastest and remember it: `run` then uses it."""
    from .measure import tune_verb

    return tune_verb(model.name(), place, flags)


@app.command()
@takes(flags=DoctorFlags)
def doctor(flags: DoctorFlags) -> int:
    """What in this machine's set-up costs speed, how much, and the command that mends it."""
    from .measure import doctor_verb

    return doctor_verb(flags)


@app.command()
@takes(flags=ConvertFlags)
def convert(flags: ConvertFlags) -> None:
    """Turn a Hugging Face folder into a GGUF file."""
    from .make import convert_verb

    convert_verb(flags)


@app.command()
@takes(flags=QuantizeFlags, report=ReportFlags)
def quantize(flags: QuantizeFlags, report: ReportFlags) -> None:
    """Make a GGUF file smaller, and say what it costs."""
    from .make import quantize_verb

    quantize_verb(flags, report)


@app.command()
@takes(flags=ImatrixFlags, place=ReadingFlags)
def imatrix(flags: ImatrixFlags, place: Any) -> None:
    """Measure which weights matter, from a text."""
    from .make import imatrix_verb

    imatrix_verb(flags, place)


def merge_words(arguments: list[str]) -> list[str]:
    """`bench attention ...` as the one word that typer knows the command by."""
    return [BENCH_ATTENTION, *arguments[2:]] if arguments[:2] == BENCH_ATTENTION.split() else list(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command line and exits with its code."""
    show.prepare_streams()
    giving_up.act = _gave_up
    endings.listen()
    endings.leave(_run(sys.argv[1:] if arguments is None else arguments))


def _gave_up(why: str) -> NoReturn:
    show.last_error(EngineError(f"the engine gave up: {why}", refusals.abort_hint(why)))
    os._exit(EngineError.exit_code)


def _invoke(arguments: list[str]) -> Any:
    # Not by calling the command: that would turn a closed pipe into exit code 1 before it gets here.
    command = typer.main.get_command(app)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    words = _with_llama_flags(merge_words(arguments or ["--help"]))
    with command.make_context("hgguf", words) as context:
        return command.invoke(context)


def _with_llama_flags(words: list[str]) -> list[str]:
    """The verb's words with llama.cpp's flags as ours, and a warning for its variables that are set and not read."""
    at = next((index for index, word in enumerate(words) if word in _LIKE_LLAMA), None)
    if at is None:
        return words
    options = [p for p in known_verbs()[words[at]].params if p.param_type_name == "option"]
    takes_value = {name: not p.is_flag for p in options for name in (*p.opts, *p.secondary_opts)}
    taken = [*words[: at + 1], *llama_flags.in_our_words(words[at + 1 :], takes_value | {"--help": False, "-h": False})]
    for name in llama_flags.unread_variables([name for p in options for name in p.envvar or ()]):
        show.warning(f"{name} is set, and hgguf does not read it")
    return taken


def _run(arguments: list[str]) -> int:
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except typer.Exit as done:  # --help, --version
        return done.exit_code if arguments else UsageError.exit_code
    except ClickException as problem:
        show.error(slips.usage_error(problem, arguments, known_verbs()))
        return UsageError.exit_code
    except HgError as problem:
        if endings.came():  # of a child that was killed
            return endings.INTERRUPTED
        if os.environ.get("HGGUF_DEBUG"):
            raise
        show.error(problem)
        return problem.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return endings.INTERRUPTED
    except BrokenPipeError:  # `| head -1`: nobody reads any more, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except SystemExit:  # what rich makes of a closed pipe, when it prints the help
        return 0
    except OSError as problem:
        return slips.system_error(problem)
    except Exception as problem:
        if os.environ.get("HGGUF_DEBUG"):
            raise
        show.error(slips.unexpected(problem))
        return 1
    return int(code or 0)


def known_verbs() -> dict[str, Any]:
    """Verb → command, for the generated docs and their test."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group has commands
