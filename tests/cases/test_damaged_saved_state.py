"""The one state that is saved so far, what an interrupted imatrix counted: a damaged one is a miss with one warning.

Cases D-18.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridgen_gguf.engine.jobs.imatrix_file import read_imatrix, write_imatrix
from hybridgen_gguf.make.imatrix import ImatrixOptions, imatrix


def flipped(data: bytes) -> bytes:
    """64 bytes in the middle of the counts, changed so that every number stays finite."""
    at = len(data) * 3 // 4
    return data[:at] + bytes(byte ^ 1 for byte in data[at : at + 64]) + data[at + 64 :]


def skipped(data: bytes) -> bytes:
    """A header that claims three chunks where two were read."""
    key = b"imatrix.chunk_count" + (4).to_bytes(4, "little")
    assert key + b"\2" in data
    return data.replace(key + b"\2", key + b"\3")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flipped,
    "skipped": skipped,
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"no matrix at all\n" * 9,
    "plain matrix": lambda data: data.replace(b"hgguf.imatrix.state_sha256", b"hgguf.imatrix.state_sha255"),
}


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A text, the matrix of all of it, and the state after two chunks as an interrupted run leaves it."""
    folder = tmp_path_factory.mktemp("state")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    whole = imatrix(ImatrixOptions(tiny, text, folder / "whole.gguf", chunk=64))
    part = imatrix(ImatrixOptions(tiny, text, folder / "part.gguf", chunk=64, most_chunks=2))
    write_imatrix(folder / "state", replace(read_imatrix(part.path), tokens=whole.tokens), exact=True)
    return text, whole.path.read_bytes(), (folder / "state").read_bytes()


@pytest.mark.parametrize("damage", DAMAGE)
def test_d18_damaged(tiny: Path, tmp_path: Path, saved: tuple[Path, bytes, bytes], damage: str) -> None:
    text, whole, state = saved
    (tmp_path / "i.gguf.partial").write_bytes(DAMAGE[damage](state))
    done = imatrix(ImatrixOptions(tiny, text, tmp_path / "i.gguf", chunk=64))
    assert done.resumed == 0
    assert [line for line in done.warnings if "damaged" in line] == [
        "what an interrupted run had saved is damaged: all was read again"
    ]
    assert (tmp_path / "i.gguf").read_bytes() == whole
    assert not (tmp_path / "i.gguf.partial").exists()


def test_d18_sound(tiny: Path, tmp_path: Path, saved: tuple[Path, bytes, bytes]) -> None:
    text, _, state = saved
    (tmp_path / "i.gguf.partial").write_bytes(state)
    done = imatrix(ImatrixOptions(tiny, text, tmp_path / "i.gguf", chunk=64))
    assert done.resumed == 2 and not any("damaged" in line for line in done.warnings)
