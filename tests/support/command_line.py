"""Runs `hgguf`: in this process where only text and exit code matter, else in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from hybridgen_gguf.cli import app as cli

COMMAND = [sys.executable, "-m", "hybridgen_gguf"]
# One thread, so that tests that run side by side do not wait for each other; no configuration of the user's.
QUIET = {"HGGUF_THREADS": "1", "XDG_CONFIG_HOME": os.devnull, "HGGUF_CONFIG": "", "HGGUF_DEBUG": ""}


@dataclass(frozen=True)
class Done:
    """What a command line left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(capsys: pytest.CaptureFixture[str], *arguments: object, **environment: str) -> Done:
    """`hgguf ARGUMENTS` in this process."""
    capsys.readouterr()
    with mock.patch.dict(os.environ, {**QUIET, **environment}):
        code = cli._run([str(argument) for argument in arguments])
    return Done(code, *capsys.readouterr())


def spawn(*arguments: object, stdin: bytes = b"", timeout: float = 60, **environment: str) -> Done:
    """`hgguf ARGUMENTS` in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin, capture_output=True, timeout=timeout, env={**os.environ, **QUIET, **environment}, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(done: Done, code: int, *words: str) -> None:
    """Asserts a plain refusal: nothing on stdout, one error that holds `words`, at most one hint, warnings before."""
    assert done.code == code, done
    assert done.out == "", done
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert lines and lines[0].startswith("error: "), done
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), done
    for word in words:
        assert word in lines[0], (word, lines[0])
