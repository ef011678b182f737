"""Every error a user can meet, as one tree.

    HgError                      exit code
    ├── UsageError        2      a flag or argument cannot be used as given
    │   └── ConfigError   2      the configuration file or an environment variable is wrong
    ├── DoesNotFit        3      no plan fits the limits; `nearest` says what would
    ├── NotFound          4      the model, file or alias does not exist
    └── Failed            1      everything else that went wrong
        ├── BadFile       1      a file is cut, damaged, foreign or hostile
        ├── EngineError   1      the engine refused or crashed
        ├── EngineMismatch 1     the library found is not the engine this version was made for
        ├── TemplateError 1      a chat template does not parse, is too slow or too large
        ├── Busy          1      a loaded model is in use by another stream
        ├── SampleError   1      nothing is left to sample from
        │   └── NotNumbers 1     logits hold NaN or infinity
        ├── DownloadError 1      network, checksum, or disk while fetching
        └── NoSpace       1      the disk is full or not writable

Each is one sentence (`what`) and, where something can be done, one hint (`hint`). The command line prints them as
`error: what` and `hint: what to do`, and exits with `exit_code`. Knows nothing of terminals.
"""

from __future__ import annotations


class HgError(Exception):
    """Base of the tree. `what`: one sentence; `hint`: what to do, or empty."""

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


class UsageError(HgError):
    """A flag or argument cannot be used as given."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration file or an environment variable is wrong."""


class DoesNotFit(HgError):
    """No plan fits the limits. `nearest` names the nearest setting that would, for programs to use."""

    exit_code = 3

    def __init__(self, what: str, hint: str = "", nearest: dict[str, int] | None = None) -> None:
        super().__init__(what, hint)
        self.nearest = nearest or {}


class NotFound(HgError):
    """The model, file or alias does not exist."""

    exit_code = 4


class Failed(HgError):
    """Anything else that went wrong."""


class BadFile(Failed):
    """A file is cut, damaged, foreign or hostile."""


class EngineError(Failed):
    """The engine refused a request or crashed in its child process."""


class EngineMismatch(Failed):
    """The library found is not the engine that this version was made for."""


class TemplateError(Failed):
    """A chat template does not parse, takes too long or writes too much."""


class Busy(Failed):
    """A loaded model answers another stream, which its reader holds open."""


class SampleError(Failed):
    """The logits hold NaN, or every token is banned."""


class NotNumbers(SampleError):
    """The logits hold NaN or infinity: the weights do, or a step of the computation overflowed."""


class DownloadError(Failed):
    """Fetching a file failed: network, checksum or source."""


class NoSpace(Failed):
    """The disk is full, or the folder cannot be written."""
