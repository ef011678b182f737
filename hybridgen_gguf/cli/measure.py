"""The verbs that measure: profile, tune, doctor. Flags → measurement → table or JSON. Imports stay light.

Knows what is printed, not how anything is measured. Invariant: stdout gets the data alone.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonFlag, ModelArgument, ModelFlag, PlaceFlags, takes


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    app.command()(profile)
    app.command()(tune)
    app.command()(doctor)


def profile(
    model: ModelArgument = None,
    json: JsonFlag = False,
    rpc: Annotated[str | None, typer.Option("--rpc", metavar="HOST:PORT,...", help="Measure RPC servers too.")] = None,
    show_only: Annotated[bool, typer.Option("--show", help="Print what was measured before; measure nothing.")] = False,
) -> None:
    """Measure this machine with the engine's own kernels (20 s) and remember it. MODEL: whose disk is read."""
    from .measuring import profile_verb

    profile_verb(model, json, rpc, show_only)


@takes(place=PlaceFlags)
def tune(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    place: PlaceFlags = PlaceFlags(),
    seconds: Annotated[float, typer.Option("--seconds", help="Time that the search may take.")] = 60.0,
    quality: Annotated[
        float, typer.Option("--quality", metavar="NATS", help="Divergence per token that a cache type may cost.")
    ] = 0.01,
    json: JsonFlag = False,
) -> int:
    """Measure around the plan, find what is fastest and remember it: `run` then uses it."""
    from ..errors import UsageError
    from .measuring import tune_verb

    chosen = model_flag if model is None else model
    if not chosen:
        raise UsageError("no model was given", "give a file, an alias (see `hgguf models`) or user/repo")
    return tune_verb(chosen, place, seconds, quality, json)


def doctor(
    json: JsonFlag = False,
    rpc: Annotated[str | None, typer.Option("--rpc", metavar="HOST:PORT,...", help="Count RPC servers too.")] = None,
) -> int:
    """What in this machine's set-up costs speed, how much, and the command that mends it."""
    from .measuring import doctor_verb

    return doctor_verb(json, rpc)
