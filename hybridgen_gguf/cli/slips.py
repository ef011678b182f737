"""What went wrong on the command line, in our words: slips, system errors, faults. Knows the verbs' names.

Invariant: every message is one line of what and one of what to do.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from typer._click.exceptions import ClickException  # typer exports only some of its subclasses

from ..errors import Failed, HgError, UsageError
from ..printable import printable
from ..processes import error_of
from . import show


def usage_error(problem: ClickException, arguments: list[str], verbs: Collection[str]) -> UsageError:
    """What the parser of flags found, in our words."""
    context = getattr(problem, "ctx", None)
    verb = next((word for word in arguments if word in verbs), None)
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


def unexpected(problem: Exception) -> HgError:
    """An exception that nobody foresaw: a lack of memory, or a fault of ours."""
    known = error_of(problem)
    if not known.what.startswith("internal error"):
        return known
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


def system_error(problem: OSError) -> int:
    """Full disk under stdout and the like: named, not traced."""
    if os.environ.get("HGGUF_DEBUG"):
        raise problem
    where = f": {problem.filename}" if problem.filename else ""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # what stdout still holds would fail again at exit
        os.dup2(nowhere.fileno(), 1)
    show.error(Failed(f"reading or writing failed: {problem.strerror or problem}{where}", "`hgguf --debug` says where"))
    return Failed.exit_code
