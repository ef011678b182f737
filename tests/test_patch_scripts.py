"""scripts/dev over tiny series and trees: what they find, and that they can find nothing else to be true."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / "scripts" / "dev"
sys.path.insert(0, str(DEV))

import hunks  # noqa: E402
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


def rebased(source: Path, series_folder: Path) -> tuple[int, dict[str, object], dict[str, list[dict[str, object]]]]:
    """The exit code, the summary, and the hunks by `patch path`."""
    done = run("rebase_report", source, "--patches", series_folder, "--json")
    answer = json.loads(done.stdout)
    found = {f"{patch['name']} {file['path']}": file["hunks"] for patch in answer["patches"] for file in patch["files"]}
    return done.returncode, answer["summary"], found


def test_rebasing_onto_the_same_tree_is_clean(source: Path, tmp_path: Path) -> None:
    """The second patch stands on the lines of the first, which makes the file longer."""
    first = [*LINES[:4], "one\n", "more\n", "and more\n", *LINES[5:]]
    second = [*first[:20], "two\n", *first[20:]]
    patches = series(tmp_path / "new", source, {"0001-a": {"a.c": first, "n.c": LINES}, "0002-b": {"a.c": second}})
    before = (source / "a.c").read_bytes()
    code, summary, found = rebased(source, patches)
    assert code == 0
    assert summary["hunks"] == {"clean": 3, "offset": 0, "fuzz": 0, "fail": 0, "behind": 0}
    assert summary["patches"] == {"clean": 2, "offset": 0, "fuzz": 0, "fail": 0}
    assert list(found) == ["0001-a a.c", "0001-a n.c", "0002-b a.c"]
    assert (source / "a.c").read_bytes() == before and not (source / "n.c").exists()


def test_clean_offset_fuzz_and_fail_are_told_apart(source: Path, tmp_path: Path) -> None:
    steps = {"0001-a": {"a.c": changed(LINES, _5="one", _20="two", _35="three"), "src/b.c": changed(LINES, _10="four")}}
    patches = series(tmp_path / "new", source, steps)
    other = changed(
        LINES, _17="upstream's", _35="upstream's"
    )  # a context line of the second, the old line of the third
    other[10:10] = ["inserted\n", "lines\n"]
    tree(tmp_path / "other", {"a.c": other, "src/b.c": ["inserted\n", *LINES]})
    code, summary, found = rebased(tmp_path / "other", patches)
    assert code == 1
    assert [(hunk["status"], hunk["offset"], hunk["fuzz"]) for hunk in found["0001-a a.c"]] == [
        ("clean", 0, 0),
        ("fuzz", 2, 1),
        ("fail", 0, 0),
    ]
    assert [(hunk["status"], hunk["offset"]) for hunk in found["0001-a src/b.c"]] == [("offset", 1)]
    assert summary["hunks"] == {"clean": 1, "offset": 1, "fuzz": 1, "fail": 1, "behind": 0}
    shown = run("rebase_report", tmp_path / "other", "--patches", patches)
    assert shown.returncode == 1
    assert "fail   0001-a: 1 clean, 1 offset, 1 fuzz, 1 fail hunks in 2 files" in shown.stdout
    assert "line 32 fail" in shown.stdout and "line 17 fuzz 1 +2 lines" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "hunks: 1 clean, 1 offset, 1 fuzz, 1 fail, 0 behind"


def test_a_failure_that_follows_from_an_earlier_one_says_so(source: Path, tmp_path: Path) -> None:
    first = [*LINES[:19], "new_call();\n", *LINES[19:]]
    second = [*first[:20], "another_call();\n", *first[20:]]
    third = changed(second, _3="elsewhere")
    steps = {"0001-a": {"a.c": first}, "0002-b": {"a.c": second}, "0003-c": {"a.c": third}}
    patches = series(tmp_path / "new", source, steps)
    other = changed(LINES, _19="upstream's", _20="own", _21="words")
    code, summary, found = rebased(tree(tmp_path / "other", {"a.c": other}), patches)
    assert code == 1
    assert summary["hunks"] == {"clean": 1, "offset": 0, "fuzz": 0, "fail": 2, "behind": 1}
    assert found["0002-b a.c"][0]["behind"] == "0001-a" and found["0001-a a.c"][0]["behind"] == ""
    assert found["0003-c a.c"][0]["status"] == "clean"  # the lost lines moved nothing in front of it


def test_files_that_came_or_went_upstream_fail_with_the_reason(source: Path, tmp_path: Path) -> None:
    steps = {"0001-a": {"a.c": changed(LINES, _5="one"), "new.c": LINES}}
    patches = series(tmp_path / "new", source, steps)
    code, _, found = rebased(tree(tmp_path / "other", {"new.c": ["upstream's own\n"]}), patches)
    assert code == 1
    assert found["0001-a a.c"][0]["why"] == "the tree has no such file"
    assert found["0001-a new.c"][0]["why"] == "the tree has such a file"


def test_hunks_applied_here_make_what_git_compared(source: Path, tmp_path: Path) -> None:
    """On random edits, of a last line without its end too, the hunks make the lines that git had made them from."""
    generator = random.Random(7)
    for trial in range(20):
        new = list(LINES)
        for _ in range(generator.randint(1, 6)):
            at = generator.randrange(len(new))
            new[at : at + generator.randint(0, 3)] = [f"trial {trial} {generator.random()}\n"] * generator.randint(0, 4)
        new += [] if trial % 2 else ["no end"]
        patches = series(tmp_path / f"new{trial}", source, {"0001-a": {"a.c": new}})
        (file,) = ps.read_series(ps.folder_texts(patches))[0].files
        lines, drift = list(LINES), 0
        for hunk in map(hunks.parse, file.hunks):
            where = hunks.fit(hunk, lines, drift)
            assert where is not None and (where.offset, where.fuzz) == (0, 0)
            before = len(lines)
            lines = hunks.applied(hunk, lines, where)
            drift += len(lines) - before
        assert lines == new


def test_a_tree_that_is_not_there_is_no_answer(tmp_path: Path) -> None:
    done = run("rebase_report", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "is no folder" in done.stderr and "hint:" in done.stderr
