"""Flags that say what is printed and whether anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .spread import plain

OUTPUT = "Output"

Json = Annotated[bool, plain(OUTPUT, "Print one JSON document on stdout.", "--json")]
Explain = Annotated[bool, plain(OUTPUT, "Say for every number why it is what it is.", "--explain")]
DryRun = Annotated[bool, plain(OUTPUT, "Print what would be done, and stop.", "--dry-run")]


@dataclass(frozen=True)
class JsonFlag:
    """--json alone."""

    json: Json = False


@dataclass(frozen=True)
class RunOutput:
    """What `run` prints beside the answer."""

    json: Json = False
    verbose: Annotated[
        bool, plain(OUTPUT, "Show the plan and what it did on stderr.", "-v", "--verbose", "--log-verbose")
    ] = False
    quiet: Annotated[bool, plain(OUTPUT, "No statistics on stderr.", "-q", "--quiet")] = False
    dry_run: DryRun = False
    explain: Explain = False


@dataclass(frozen=True)
class PlanOutput:
    """How `plan` prints the plan."""

    json: Json = False
    explain: Explain = False
    form: Annotated[
        str, plain(OUTPUT, "A table, or the flags for stock llama.cpp.", "--format", metavar="table|args")
    ] = "table"
