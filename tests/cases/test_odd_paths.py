"""Names of files that are odd, nearly right, or stand for something else: for what is read and for what is written.

Cases D-01 to D-05.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import tinygguf
from command_line import COMMAND, QUIET, call, refused, spawn

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", ["/dev/stdin", "/proc/self/fd/0", "/dev/fd/0"])
def test_d01_a_name_that_means_another_file_in_each_process(tiny: Path, name: str) -> None:
    with tiny.open("rb") as file:
        done = subprocess.run(
            [*COMMAND, "run", name, "-p", "hi", "-n", "1"],
            stdin=file, capture_output=True, timeout=60, env={**os.environ, **QUIET}, check=False,
        )  # fmt: skip
    assert done.returncode == 0 and done.stdout, done
    refused(spawn("run", name, "-p", "hi", stdin=tiny.read_bytes()), 1, "is not a regular file")


@pytest.mark.parametrize(
    "name", ["模型 👩\u200d👩\u200d👧.gguf", "a\nb.gguf", os.fsdecode(b"\xff\xfe.gguf"), "a\u202eb.gguf", "%s%n.gguf"]
)
def test_d01_any_name_that_the_system_takes(tiny: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(tiny.read_bytes())
    done = call(capsys, "run", path, "-p", "hi", "-n", 4, "-s", 1)
    assert (done.code, done.out) == (0, call(capsys, "run", tiny, "-p", "hi", "-n", 4, "-s", 1).out)
    assert spawn("validate", path, LC_ALL="C", PYTHONUTF8="0").code == 0
    path.write_bytes(b"GGUF")
    done = call(capsys, "run", path, "-p", "hi")
    refused(done, 1, "cut short")
    assert done.err.isprintable() or done.err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("typed", "meant"), [("TINY.GGUF", "tiny.gguf"), ("tiny.ggu", "tiny.gguf"), ("tiny.gguf/", "tiny.gguf")]
)
def test_d01_a_slip_in_a_file_name(tiny: Path, tmp_path: Path, capsys: Capture, typed: str, meant: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny.read_bytes())
    done = call(capsys, "run", f"{tmp_path}/{typed}", "-p", "hi")
    refused(done, 4, "does not exist")
    assert f"did you mean {tmp_path / meant}?" in done.err


def test_d01_a_slip_in_a_relative_name_is_no_repository(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/tiny.gguf").write_bytes(tiny.read_bytes())
    done = call(capsys, "run", "models/tiny.ggu", "-p", "hi")
    refused(done, 4)
    assert "did you mean models/tiny.gguf?" in done.err
    refused(call(capsys, "run", "https://huggingface.co/a/b", "-p", "hi"), 4, "is an address")


def test_d04_a_missing_first_part_is_named(tmp_path: Path, capsys: Capture) -> None:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    parts[0].unlink()
    refused(call(capsys, "run", parts[0], "-p", "hi"), 4, "part 1 of 3 is missing")


def test_d04_links_to_every_part_as_in_a_cache_of_the_hub(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    tinygguf.build(tmp_path / "m.gguf", split=7)
    for number, part in enumerate(sorted(tmp_path.glob("m-*.gguf"))):
        part.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / part.name).symlink_to(f"../blobs/{number}")
    for part in sorted((tmp_path / "snapshot").iterdir()):
        assert call(capsys, "run", part, "-p", "hi", "-n", 1).code == 0


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "-", "/dev/null", "/dev/new"])
def test_d05_an_output_that_is_a_stream(tiny: Path, tmp_path: Path, name: str) -> None:
    """Renaming a result onto such a name would put a file in the system's place."""
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [*COMMAND, "quantize", tiny, name, "Q8_0"],
            stdout=out, stderr=subprocess.PIPE, timeout=60, cwd=tmp_path, env={**os.environ, **QUIET}, check=False,
        )  # fmt: skip
    assert done.returncode == 2 and b"is not a regular file" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out").stat().st_size


def test_d05_chains_of_links_to_the_input(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    content = tiny.read_bytes()
    source = tmp_path / "a.gguf"
    source.write_bytes(content)
    (tmp_path / "l1").symlink_to("a.gguf")
    (tmp_path / "l2").symlink_to(tmp_path / "l1")
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "hard").hardlink_to(source)
    (tmp_path / "sub" / "up").symlink_to("../here/l2")
    for model, output in (
        ("a.gguf", "l2"), ("l2", "a.gguf"), ("a.gguf", "here/here/l1"), ("sub/hard", "sub/up"), ("a.gguf", "a.gguf/"),
        ("a.gguf", f"../{tmp_path.name}/a.gguf"),
    ):  # fmt: skip
        done = call(capsys, "quantize", tmp_path / model, f"{tmp_path}/{output}", "Q8_0")
        refused(done, 2, "is the input")
        assert source.read_bytes() == content


def test_d05_what_lies_beside_an_output_is_no_input(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    """A manifest goes to OUTPUT.json, and counts of an interrupted run to OUTPUT.partial."""
    for name in ("im.json", "im.partial"):
        text = tmp_path / name
        text.write_text("word " * 400, encoding="utf-8")
        refused(call(capsys, "imatrix", tiny, "-f", text, "-o", tmp_path / "im"), 2, "is the input")
        assert text.read_text(encoding="utf-8") == "word " * 400


def test_d05_every_part_of_a_split_input_is_kept(tmp_path: Path, capsys: Capture) -> None:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    before = [part.read_bytes() for part in parts]
    refused(call(capsys, "quantize", parts[0], parts[1], "Q8_0"), 2, "is the input")
    refused(call(capsys, "quantize", parts[1], tmp_path / "m.gguf", "Q8_0", "--keep-split"), 2, "is the input")
    assert [part.read_bytes() for part in parts] == before
