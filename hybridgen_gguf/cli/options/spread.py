"""How a flag is declared, and how a command takes groups of flags as dataclasses. Knows no flag.

Invariant: typer sees one parameter a field; the command gets one object a group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, TypeVar, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., Any])


def flag(panel: str, text: str, *names: str, llama: str = "", metavar: str | None = None) -> Any:
    """An option whose environment variables are HGGUF_<LONG NAME> and then llama.cpp's `llama` (several: by spaces)."""
    long = max((name.partition("/")[0] for name in names), key=len)
    own = "HGGUF_" + long.lstrip("-").upper().replace("-", "_")
    variables = [own, *(f"LLAMA_ARG_{name}" for name in llama.split())]
    return typer.Option(*names, help=text, rich_help_panel=panel, envvar=variables, show_envvar=False, metavar=metavar)


def plain(
    panel: str, text: str, *names: str, metavar: str | None = None, least: int | None = None, most: int | None = None
) -> Any:
    """An option without environment variables: what one call asks for."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, min=least, max=most)


def argument(metavar: str, text: str) -> Any:
    """A word by its place."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def subset(name: str, group: type, kept: tuple[str, ...]) -> type:
    """A group with some flags of another, under the same names, helps and defaults."""
    hints = get_type_hints(group, include_extras=True)
    chosen = [(f.name, hints[f.name], field(default=f.default)) for f in fields(group) if f.name in kept]
    return make_dataclass(name, chosen, frozen=True)


def takes(**groups: type) -> Callable[[Command], Command]:
    """Spreads groups of flags over a command's parameters, in the order given."""

    def decorate(command: Command) -> Command:
        spread = [parameter for group in groups.values() for parameter in _parameters(group)]

        def call(**values: Any) -> Any:
            made = {
                name: group(**{field.name: values[field.name] for field in fields(group)})
                for name, group in groups.items()
            }
            return command(**made)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]  # functions take attributes
        call.__annotations__ = {p.name: p.annotation for p in spread}
        return call  # type: ignore[return-value]  # same command, other spelling of its parameters

    return decorate


@functools.cache  # reading the hints of one large group takes 2 ms, and several verbs take it
def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    empty = inspect.Parameter.empty
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]
