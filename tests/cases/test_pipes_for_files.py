"""A named pipe where a file is expected: refused at once, or read where somebody writes into it; never waited for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, QUIET

VERBS = [
    ("inspect", "{}"),
    ("validate", "{}"),
    ("run", "{}", "-p", "x", "-n", "1"),
    ("bench", "{}"),
    ("quantize", "{}", "o.gguf", "Q8_0"),
    ("quantize", "MODEL", "o.gguf", "Q8_0", "--imatrix", "{}"),
    ("quantize", "MODEL", "o.gguf", "Q8_0", "--report", "--text", "{}"),
    ("imatrix", "MODEL", "-f", "{}", "-o", "i.gguf"),
    ("imatrix", "{}", "-f", "text.txt", "-o", "i.gguf"),
    ("convert", "{}", "o.gguf"),
    ("run", "MODEL", "-f", "{}", "-n", "1"),
    ("run", "MODEL", "-p", "x", "--plan", "{}"),
    ("run", "MODEL", "-p", "x", "--chat-template", "{}"),
]


def run(folder: Path, words: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    env = {**QUIET, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, env=env, check=False)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_pipe_nobody_writes_into(tiny: Path, tmp_path: Path, verb: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.txt").write_text("words " * 300)
    done = run(tmp_path, tuple(word.format("pipe").replace("MODEL", str(tiny)) for word in verb))
    assert done.returncode in (1, 2, 4) and done.stdout == ""
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert "pipe" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "text.txt"]


def test_settings_in_a_pipe(tiny: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for variable in ("HGGUF_CONFIG", "HGGUF_MODELS_FILE"):
        done = run(tmp_path, ("models",), **{variable: str(tmp_path / "pipe")})
        assert done.returncode == 2 and "it is a pipe, not a file" in done.stderr


def test_a_prompt_from_a_command(tiny: Path) -> None:
    words = f"{' '.join(COMMAND)} run {tiny} --raw -n 1 -c 256 -f <(sleep 0.3; echo hello)"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=60, env=QUIET, check=False)
    assert done.returncode == 0 and "prompt" in done.stderr, done.stderr
