"""scripts/dev over tiny series and trees: what they find, and that they can find nothing else to be true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / "scripts" / "dev"
sys.path.insert(0, str(DEV))

import patch_series as ps  # noqa: E402

LINES = [f"line {number}\n" for number in range(1, 41)]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEV / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def tree(folder: Path, files: dict[str, list[str]]) -> Path:
    for path, lines in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes("".join(lines).encode())
    return folder


def changed(lines: list[str], **at: str) -> list[str]:
    """A copy with line N replaced, for `_N=text`."""
    new = list(lines)
    for place, text in at.items():
        new[int(place[1:]) - 1] = text + "\n"
    return new


def series(folder: Path, source: Path, steps: dict[str, dict[str, list[str]]]) -> Path:
    """Writes a series that takes `source` through `steps`: by patch name, the files after it. By way of series_tree."""
    work = folder.with_name(folder.name + "-tree")
    subprocess.run(["cp", "-r", str(source), str(work)], check=True)
    ps.make_repository(work)
    for name, files in steps.items():
        tree(work, files)
        ps.git(work, "add", "--all")
        ps.commit(work, ps.Patch(name, f"{name}: a title\n\nWhy: a test.\nOff switch: none, because it is one.", ""))
    folder.mkdir()
    done = run("series_tree", "write", work, "--to", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", {"a.c": LINES, "src/b.c": LINES, "untouched.c": LINES})


def test_a_regrouped_series_is_the_same_tree(source: Path, tmp_path: Path) -> None:
    both = changed(changed(LINES, _5="one"), _30="two\r")  # a carriage return must survive
    old = series(tmp_path / "old", source, {"0001-a": {"a.c": changed(LINES, _5="one")}, "0002-b": {"a.c": both}})
    new = series(tmp_path / "new", source, {"0001-ab": {"a.c": both}})
    done = run("compare_patch_trees", old, new, "--source", source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 and 1 patches, 1 files, 0 differ" in done.stdout


def test_trees_that_differ_are_named(source: Path, tmp_path: Path) -> None:
    old = series(tmp_path / "old", source, {"0001-a": {"a.c": changed(LINES, _5="one"), "src/old.c": LINES}})
    new = series(tmp_path / "new", source, {"0001-a": {"a.c": changed(LINES, _5="One"), "src/b.c": LINES[:-1]}})
    done = run("compare_patch_trees", old, new, "--source", source)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:3] == ["differs: a.c", "differs: src/b.c", "only old: src/old.c"]


def test_a_series_that_does_not_apply_is_no_answer(source: Path, tmp_path: Path) -> None:
    old = series(tmp_path / "old", source, {"0001-a": {"a.c": changed(LINES, _5="one")}})
    other = tree(tmp_path / "other", {"a.c": changed(LINES, _4="moved on")})
    done = run("compare_patch_trees", old, old, "--source", other)
    assert done.returncode == 2
    assert "0001-a does not apply" in done.stderr and "hint:" in done.stderr


def test_the_tree_gives_the_series_back(source: Path, tmp_path: Path) -> None:
    """patches/ is what the tree of its commits writes: nobody edited a diff by hand, and `Files:` is true."""
    folder = tmp_path / "tree"
    patches = ps.read_series(ps.folder_texts(ps.PATCHES))
    try:
        pinned = ps.pinned_sources()
    except ps.SeriesError as error:
        pytest.skip(str(error))
    ps.copy_touched(pinned, patches, folder)
    ps.make_repository(folder)
    for patch in patches:
        ps.apply(folder, patch)
        ps.commit(folder, patch)
    written = {f"{patch.name}.patch": ps.patch_text(patch) for patch in ps.read_tree(folder)}
    lying = {name: text for name, text in ps.folder_texts(ps.PATCHES).items() if name != "series"}
    assert written == lying


@pytest.mark.parametrize("patch", ps.read_series(ps.folder_texts(ps.PATCHES)), ids=lambda patch: patch.name)
def test_headers_say_all_that_a_reader_needs(patch: ps.Patch) -> None:
    places = [patch.header.find(f"\n{label}:") for label in ("Why", "What", "Effect", "Off switch", "Files")]
    assert -1 not in places and places == sorted(places)
    assert not patch.header.startswith("Why:")  # a title first
    effect, switch = (patch.header[start:end] for start, end in ((places[2], places[3]), (places[3], places[4])))
    assert any(letter.isdigit() for letter in effect) or "no measurable" in effect
    assert ", because " in switch or "none" not in switch


def test_changes_in_no_commit_are_not_lost(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    subprocess.run(["cp", "-r", str(source), str(work)], check=True)
    ps.make_repository(work)
    (work / "a.c").write_text("edited\n")
    done = run("series_tree", "write", work, "--to", tmp_path)
    assert done.returncode == 2
    assert "in no commit" in done.stderr
