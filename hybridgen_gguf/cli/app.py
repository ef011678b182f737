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

from ..engine import giving_up
from ..errors import EngineError, Failed, HgError, UsageError
from ..printable import printable
from . import bench as cli_bench
from . import make as cli_make
from . import measure as cli_plan
from . import show
from .bench import merge_words
from .options import ExplainFlag, JsonFlag, ModelArgument, ModelFlag, PlaceFlags, PromptFlags, SampleFlags, takes
from .thinking import ThinkFlags

INTERRUPTED = 130
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
@takes(ask=PromptFlags, think=ThinkFlags, place=PlaceFlags, sampling=SampleFlags)
def run(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    ask: PromptFlags = PromptFlags(),
    think: ThinkFlags = ThinkFlags(),
    place: PlaceFlags = PlaceFlags(),
    sampling: SampleFlags = SampleFlags(),
    json: JsonFlag = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the plan and what it did on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No statistics on stderr.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    explain: ExplainFlag = False,
) -> int:
    """Answer one prompt, as it is written. Piped standard input is the prompt."""
    from .run import Output, run_verb

    output = Output(json, verbose or explain, quiet)
    return run_verb(_one_model(model, model_flag), ask, place, sampling, think, output, dry_run)


@app.command()
@takes(place=PlaceFlags)
def plan(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    place: PlaceFlags = PlaceFlags(),
    json: JsonFlag = False,
    explain: ExplainFlag = False,
    form: Annotated[
        str, typer.Option("--format", metavar="table|args", help="args: flags for stock llama.cpp.")
    ] = "table",
) -> None:
    """What would lie and run where, and why. Nothing is loaded."""
    from .run import plan_verb

    plan_verb(_one_model(model, model_flag), place, json, explain, form)


@app.command()
def inspect(model: ModelArgument = None, model_flag: ModelFlag = None, json: JsonFlag = False) -> None:
    """What a file holds: shape, tensors, metadata. Reads the header alone."""
    from .files import inspect_verb

    inspect_verb(_one_model(model, model_flag), json)


@app.command()
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="GGUF files, or aliases that were fetched.")],
    json: JsonFlag = False,
    check_tensors: Annotated[
        bool, typer.Option("--check-tensors", help="Also read all weights and look for NaN and Inf.")
    ] = False,
) -> int:
    """Whether files are sound. Each is checked by the engine in a process of its own."""
    from .files import validate_verb

    return validate_verb(files, json, check_tensors)


@app.command()
def pull(model: ModelArgument = None, model_flag: ModelFlag = None, json: JsonFlag = False) -> None:
    """Fetch a model and check its digest. What is there already is not fetched again."""
    from .files import pull_verb

    pull_verb(_one_model(model, model_flag), json)


@app.command()
def models(json: JsonFlag = False) -> None:
    """List the models that have a name here."""
    from .files import models_verb

    models_verb(json)


@app.command()
def engine(json: JsonFlag = False) -> None:
    """Which engine is used: its folder, commit, patches, switches, backends and devices."""
    from .files import engine_verb

    engine_verb(json)


@app.command()
@takes(place=PlaceFlags)
def bench(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    place: PlaceFlags = PlaceFlags(),
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", help="Tokens to read, separated by commas; 0: none.")
    ] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Tokens to write, separated by commas; 0: none.")] = "128",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens in the context before each test.")] = "0",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Repetitions of each test.")] = 5,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="md|json|jsonl|csv", help="Format on stdout.")
    ] = "md",
    json: JsonFlag = False,
) -> int:
    """Measure reading and writing speed, as llama-bench does."""
    from .run import bench_verb

    return bench_verb(
        _one_model(model, model_flag), place, (n_prompt, n_gen, n_depth), repetitions, "json" if json else output
    )


cli_bench.register(app)
cli_plan.register(app)
cli_make.register(app)


def _one_model(argument: str | None, flag: str | None) -> str:
    chosen = flag if argument is None else argument
    if not chosen:
        raise UsageError("no model was given", "give a file, an alias (see `hgguf models`) or user/repo")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Runs a command line and exits with its code."""
    show.prepare_streams()
    giving_up.act = _gave_up
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _gave_up(why: str) -> NoReturn:
    hint = "the file is damaged or hostile, or this is a fault of the engine"
    show.last_error(EngineError(f"the engine gave up: {why}", hint))
    os._exit(EngineError.exit_code)


def _invoke(arguments: list[str]) -> Any:
    # Not by calling the command: that would turn a closed pipe into exit code 1 before it gets here.
    command = typer.main.get_command(app)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    with command.make_context("hgguf", merge_words(arguments or ["--help"])) as context:
        return command.invoke(context)


def _run(arguments: list[str]) -> int:
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except typer.Exit as done:  # --help, --version
        return done.exit_code if arguments else UsageError.exit_code
    except ClickException as problem:
        show.error(_usage_error(problem, arguments))
        return UsageError.exit_code
    except HgError as problem:
        if os.environ.get("HGGUF_DEBUG"):
            raise
        show.error(problem)
        return problem.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # `| head -1`: nobody reads any more, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except SystemExit:  # what rich makes of a closed pipe, when it prints the help
        return 0
    except OSError as problem:
        return _system_error(problem)
    except Exception as problem:
        if os.environ.get("HGGUF_DEBUG"):
            raise
        show.error(_unexpected(problem))
        return 1
    return int(code or 0)


def _usage_error(problem: ClickException, arguments: list[str]) -> UsageError:
    """What the parser of flags found, in our words."""
    context = getattr(problem, "ctx", None)
    verb = next((word for word in arguments if word in known_verbs()), None)
    command = context.command_path if context else f"hgguf {verb}" if verb else "hgguf"
    text = problem.format_message().strip().removesuffix(".").replace("'. Did you", "'; did you")
    for phrase, needed in _NEEDED.items():
        if phrase in text:
            text = f"{_where(getattr(problem, 'param', None), context, arguments)}: {needed} is needed"
    return UsageError(text[:1].lower() + text[1:], _meant(text, command, arguments) or f"see `{command} --help`")


_ELSEWHERE = {
    **dict.fromkeys(("chat", "ask", "generate", "complete", "completion", "cli"), "hgguf run MODEL"),
    **dict.fromkeys(("list", "ls", "ps"), "hgguf models"),
    **dict.fromkeys(("download", "fetch", "get"), "hgguf pull NAME"),
    **dict.fromkeys(("info", "show", "dump"), "hgguf inspect MODEL"),
    **dict.fromkeys(("check", "verify"), "hgguf validate FILE"),
    **dict.fromkeys(("version",), "hgguf --version"),
}


def _meant(text: str, command: str, arguments: list[str]) -> str:
    """What whoever made a common slip may have wanted; empty when nothing comes to mind."""
    from ..models.registry import is_known

    first = arguments[0] if arguments else ""
    if text.startswith("No such command"):
        if first in _ELSEWHERE:
            return f"did you mean `{_ELSEWHERE[first]}`?"
        if first.lower().endswith(".gguf") or is_known(first):
            return f"did you mean `hgguf run {printable(first)}`?"
    if text.startswith("Got unexpected extra argument") and command == "hgguf run":
        return 'a prompt is given with -p "..."'
    return ""


def _unexpected(problem: Exception) -> HgError:
    if isinstance(problem, MemoryError):
        return Failed("there is not enough memory to go on", "free some, or raise the limit on it (ulimit -v)")
    what = " ".join(f"internal error: {type(problem).__name__}: {problem}".split())
    return HgError(what[:300], "this is a fault of hgguf: see --debug")


_NEEDED = {
    "be a valid integer": "a whole number",
    "be a valid number": "a number",
    "be a valid boolean": "yes or no",
    "must be an iterable": "a list",
}


def _where(parameter: Any, context: Any, arguments: list[str]) -> str:
    """The flag, environment variable or key of the configuration file that a value came from."""
    names = getattr(parameter, "opts", [])
    given = [word for word in arguments for name in names if word.startswith(name)]
    variables = [name for name in getattr(parameter, "envvar", None) or () if os.environ.get(name)]
    if variables and not given:
        return f"environment variable {variables[0]}={os.environ[variables[0]]}"
    if not given and context and parameter.name in (context.default_map or {}):
        long = next(name for name in names if name.startswith("--"))
        return f"{long.lstrip('-').replace('-', '_')} in the configuration file"
    return "/".join(names)


def _system_error(problem: OSError) -> int:
    """Full disk under stdout and the like: named, not traced."""
    if os.environ.get("HGGUF_DEBUG"):
        raise problem
    where = f": {problem.filename}" if problem.filename else ""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # what stdout still holds would fail again at exit
        os.dup2(nowhere.fileno(), 1)
    show.error(Failed(f"reading or writing failed: {problem.strerror or problem}{where}", "`hgguf --debug` says where"))
    return Failed.exit_code


def known_verbs() -> dict[str, Any]:
    """Verb → command, for the generated docs and their test."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group has commands
