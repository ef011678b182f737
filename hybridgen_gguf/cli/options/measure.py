"""Flags of the verbs that measure a machine: profile, tune, doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .output import Json
from .place import Rpc
from .spread import argument, plain

MEASURE = "Measurement"


@dataclass(frozen=True)
class ProfileFlags:
    """What `profile` measures."""

    model: Annotated[str | None, argument("MODEL", "A file on the disk to measure. [default: no disk is measured]")] = (
        None
    )
    json: Json = False
    rpc: Rpc = None
    show: Annotated[bool, plain(MEASURE, "Print the last measurement and measure nothing.", "--show")] = False


@dataclass(frozen=True)
class TuneFlags:
    """How long `tune` may take, and what quality it may spend."""

    seconds: Annotated[float, plain(MEASURE, "Time that the search may take.", "--seconds")] = 60.0
    quality: Annotated[
        float,
        plain(MEASURE, "KL divergence per token that a KV cache type may cost.", "--quality", metavar="NATS"),
    ] = 0.01
    json: Json = False


@dataclass(frozen=True)
class DoctorFlags:
    """What `doctor` looks at beside this machine."""

    json: Json = False
    rpc: Rpc = None
