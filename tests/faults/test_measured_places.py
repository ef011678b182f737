"""What was measured cannot be remembered: told before the minute that measuring takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call, refused


@pytest.mark.parametrize(
    ("verb", "variable"), [(("profile",), "HGGUF_PROFILE"), (("tune", "MODEL", "--seconds", 600), "HGGUF_DATA")]
)
def test_a_place_that_cannot_be_written(
    tiny: Path, capsys: pytest.CaptureFixture[str], verb: tuple[object, ...], variable: str
) -> None:
    words = [tiny if word == "MODEL" else word for word in verb]
    done = call(capsys, *words, **{variable: "/proc/nowhere/x"})
    refused(done, 1, "cannot be written", "nothing could be remembered")
    assert f"set {variable}" in done.err
