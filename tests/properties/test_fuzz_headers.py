"""Damaged headers of a loadable model, opened and run: the process lives, and says one thing."""

from __future__ import annotations

import os
from pathlib import Path

from command_line import spawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("HGGUF_FUZZ_EXAMPLES", "40"))
HEADER = 7_000  # bytes of TINY's keys and tensor entries

WORDS = st.sampled_from(
    [b"\0", b"\1", b"\xff", b"\x80", b"\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\x80\xbf"]
)
DAMAGE = st.lists(
    st.tuples(st.integers(4, HEADER), st.one_of(WORDS, st.binary(min_size=1, max_size=4))), min_size=1, max_size=3
)


@settings(
    max_examples=max(EXAMPLES // 3, 1),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(damage=DAMAGE)
def test_damaged_headers(tiny: Path, tmp_path: Path, damage: list[tuple[int, bytes]]) -> None:
    data = bytearray(tiny.read_bytes())
    for place, piece in damage:
        data[place : place + len(piece)] = piece
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    done = spawn("run", bad, "-p", "hi", "--raw", "-n", 3, timeout=60)
    assert done.code in (0, 1, 2, 3, 4), done
    assert "Traceback" not in done.err and "internal error" not in done.err, done
    assert done.code == 0 or done.err.count("error: ") == 1, done
