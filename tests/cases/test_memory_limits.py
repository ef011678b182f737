"""A limit on memory is named by where it comes from, with true figures; what fits under it is not refused."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, QUIET, Done, call

from hybridgen_gguf.cli import slips
from hybridgen_gguf.units import parse_size

MIB = 1 << 20


def limited(mib: int, *arguments: object) -> Done:
    """`hgguf ARGUMENTS` with so much address space."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, **QUIET}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB)),
    )  # fmt: skip
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def sizes(text: str) -> list[int]:
    return [parse_size(f"{number}{unit}") for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB|GiB)", text)]


def test_the_limit_of_the_process_is_named(smollm2: Path) -> None:
    done = limited(400, "plan", smollm2, "-c", 8192)
    assert done.code == 3 and done.out == ""
    line = done.err.splitlines()[0]
    assert "this process's limit of 400.00 MiB (ulimit -v) leaves" in line
    needed, limit, left, reserve = sizes(line)
    assert limit == 400 * MIB and left < limit
    assert left - reserve < needed < 400 * MIB
    warned = limited(460, "plan", smollm2)
    assert warned.code == 0
    assert re.search(r"context capped to \d+ tokens by this process's limit of 460.00 MiB \(ulimit -v\)", warned.err)


def test_what_fits_runs(smollm2: Path, tiny: Path) -> None:
    """And what the plan lets through must not die of the limit."""
    assert limited(300, "run", tiny, "-p", "hi", "-n", 1).code == 0
    codes = []
    for mib in range(400, 640, 40):
        done = limited(mib, "run", smollm2, "-p", "hi", "-n", 2, "-c", 512, "-q")
        assert done.code in (0, 3), done
        assert done.code == 0 or "(ulimit -v) leaves" in done.err
        codes.append(done.code)
    for mib in (420, 460, 500):  # the largest context that the plan thinks possible
        done = limited(mib, "run", smollm2, "-p", "hi", "-n", 2)
        assert done.code == 0 and "context capped to" in done.err, done
    assert codes == sorted(codes, reverse=True) and codes[-1] == 0 and codes.count(3) <= 3


def test_the_users_own_limit_is_named(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "plan", smollm2, "-c", 8192, "--ram", "200MiB")
    assert done.code == 3 and "and --ram is 200.00 MiB" in done.err


def test_threads_that_cannot_start_are_no_fault_of_ours() -> None:
    told = slips.unexpected(RuntimeError("can't start new thread"))
    assert "threads" in told.what and "internal error" not in told.what
