"""A lock on memory that the system refuses is told, with the bytes and the way to raise the limit (A-11)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND

HEAD = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
LIMITED = [*HEAD, "bash", "-c", 'ulimit -l 64; exec "$@"', "bash"]


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*LIMITED, *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


needs_setpriv = pytest.mark.skipif(
    shutil.which("setpriv") is None or subprocess.run([*HEAD, "true"], capture_output=True).returncode != 0,
    reason="setpriv cannot take away the right to pass limits here",
)


@needs_setpriv
def test_one_warning_and_the_run_goes_on(tiny: Path) -> None:
    done = limited("run", tiny, "-c", 256, "-n", 2, "--mlock", "-p", "hi")
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "--mlock" in line]
    assert len(told) == 1 and "may lock 64.00 KiB" in told[0] and "ulimit -l" in told[0]


@needs_setpriv
def test_plan_and_doctor_say_it_too(tiny: Path) -> None:
    made = json.loads(limited("plan", tiny, "--mlock", "--json").stdout)["plan"]
    assert any("--mlock" in warning for warning in made["warnings"])
    assert next(reason["value"] for reason in made["reasons"] if reason["name"] == "mlock") == "fails in part"
    assert "64.00 KiB may be locked" in limited("doctor").stdout


@needs_setpriv
def test_no_warning_where_it_fits_or_is_not_asked_for(tiny: Path) -> None:
    assert "mlock" not in limited("plan", tiny).stderr
    wide = [part.replace("ulimit -l 64", "ulimit -l 65536") for part in LIMITED]
    done = subprocess.run([*wide, *COMMAND, "plan", str(tiny), "--mlock"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "mlock" not in done.stderr
