"""Runs `hgguf` in a process of its own, for tests of exit codes, signals and what is left on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from hybridgen_gguf.cli.app import main\nmain()"]


def hgguf(*arguments: str | Path, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs the command line `arguments` to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=timeout)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Asserts a plain refusal: an exit code of ours, nothing on stdout, one error line that holds `words`."""
    assert done.returncode in (1, 2, 3, 4), (done.returncode, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])
