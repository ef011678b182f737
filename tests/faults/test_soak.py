"""Random arrivals, cancels, lengths and settings for a while: scripts/bench/soak, which runs for an hour elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinygguf

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "soak"


@pytest.mark.slow
def test_a_soak_leaks_no_cell_and_loses_no_request(tmp_path: Path) -> None:
    """In 512 cells six requests crowd each other. A short run's memory still grows into its shape: 10 % are let be."""
    model = tinygguf.build(tmp_path / "tiny.gguf", ctx=512)
    out = tmp_path / "soak.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--model", str(model), "--seconds", "15", "--ctx", "512"]
    command += ["--growth", "0.1", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_WAIT_POLICY": "passive"}
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(out.read_text())["summary"]
    assert found["finished"] > 20 and found["cancelled"] > 0 and found["compared"] > 20
