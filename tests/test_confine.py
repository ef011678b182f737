"""A confined process: no network, no programs, no code from a folder, no pickled objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_START = """
import sys
from pathlib import Path
from hybridgen_gguf.make.confine import ForbiddenError, confine
folder = Path(sys.argv[1])
confine((folder,), "code" in sys.argv, "pickle" in sys.argv)
"""
_ACTS = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "look up": "import socket; socket.getaddrinfo('localhost', 80)",
    "program": "import subprocess; subprocess.run(['true'])",
    "shell": "import os; os.system('true')",
    "pickle": "import pickle; pickle.loads(b'cos\\nsystem\\n.')",
    "import": "sys.path.insert(0, str(folder)); import tok",
    "exec": "import runpy; runpy.run_path(str(folder / 'tok.py'))",
}


def _run(folder: Path, act: str, *allowed: str) -> str:
    (folder / "tok.py").write_text("x = 1\n")
    tried = f"try:\n    {act}\n    print('done')\nexcept ForbiddenError as error:\n    print('forbidden:', error)\n"
    code = _START + tried
    done = subprocess.run([sys.executable, "-c", code, folder, *allowed], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted(_ACTS))
def test_forbidden(tmp_path: Path, name: str) -> None:
    assert _run(tmp_path, _ACTS[name]).startswith("forbidden: ")


def test_what_was_allowed_works(tmp_path: Path) -> None:
    assert _run(tmp_path, _ACTS["import"], "code") == "done"
    assert _run(tmp_path, _ACTS["pickle"], "pickle") == "done"


def test_ordinary_work_goes_on(tmp_path: Path) -> None:
    assert _run(tmp_path, "import json, numpy; json.loads('{}'); (folder / 'a').write_text('b')") == "done"
