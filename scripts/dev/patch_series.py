"""A series of patches as data, and as a git tree: read, apply, write. Used by the scripts beside it.

A series is a folder with the file `series` (names of patches, one a line, `#` for comments) and the patches it names.
A patch is a header, a line `---`, and a diff as git writes it. As a git tree each patch is one commit on the pinned
sources: the subject is the name, the body is the header. Knows nothing of what the patches do. Needs git.
Invariant: git runs apart from the user's configuration and from any repository around the folder it is given.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
PATCHES = ROOT / "patches"
_IDENTITY = ("-c", "user.name=hgguf", "-c", "user.email=hgguf@localhost", "-c", "commit.gpgsign=false")
#: The same bytes whatever the user's git is set to.
_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--full-index", "--unified=3",
         "--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "--no-indent-heuristic")  # fmt: skip
_FILES_WIDTH = 128


class SeriesError(Exception):
    """What is wrong, in one sentence, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


@dataclass(frozen=True)
class Patch:
    """`name` without `.patch`; `header` without the line `---`; `diff` from the first `diff --git` on."""

    name: str
    header: str
    diff: str

    @property
    def files(self) -> list[FileDiff]:
        parts = re.split(r"(?m)^(?=diff --git )", self.diff)
        return [FileDiff.read(part) for part in parts if part.startswith("diff --git ")]


@dataclass(frozen=True)
class FileDiff:
    """One file's part of a patch: its `path` afterwards, `head` up to the first hunk, `hunks` from `@@` on."""

    path: str
    head: str
    hunks: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> FileDiff:
        head, *hunks = re.split(r"(?m)^(?=@@ -)", text)
        named = re.search(r"(?m)^\+\+\+ b/(.*)$", head) or re.search(r"(?m)^--- a/(.*)$", head)
        named = named or re.match(r"diff --git a/(.*) b/", head)
        if named is None:
            raise SeriesError("a part of a patch names no file", "write the patch with `git diff`")
        return cls(named[1], head, tuple(hunks))

    @property
    def is_new(self) -> bool:
        return "\nnew file mode " in self.head


def fail(what: str, hint: str) -> NoReturn:
    """Ends the script with 2, so that 1 can mean an answer."""
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)


def pinned_sources() -> Path:
    """The unpacked, unpatched sources that scripts/setup leaves in the user's cache."""
    sys.path.insert(0, str(PATCHES.parent))
    try:
        from hybridgen_gguf.folders import cache_folder

        cache = cache_folder()
    except ImportError:
        raise SeriesError(
            "the packages of the virtual environment are missing", "run this with .venv/bin/python"
        ) from None
    pin = json.loads((PATCHES / "pin.json").read_text(encoding="utf-8"))
    folder = cache / "source" / pin["sha256"][:16]
    if not folder.is_dir():
        raise SeriesError(f"the pinned sources are not in {folder}", "run scripts/setup, or name a tree with --source")
    return folder


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def git(folder: Path, *arguments: str, text: str = "", check: bool = True) -> Answer:
    """Runs git in `folder` with `text` as its input. With `check` a failure is a SeriesError with git's first words."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "LC_ALL": "C",
    }
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, input=encoded(text), capture_output=True
        )  # bytes: a text may have line ends of its own
    except FileNotFoundError:
        raise SeriesError("git is not installed", "install git") from None
    answer = Answer(done.returncode, decoded(done.stdout), decoded(done.stderr))
    if check and answer.code:
        words = (answer.err.strip() or answer.out.strip() or "no words").splitlines()[0]
        raise SeriesError(f"git {arguments[0]} failed: {words}", f"run it in {folder}")
    return answer


def parse_patch(name: str, text: str) -> Patch:
    header, mark, diff = text.partition("\n---\n")
    start = re.search(r"(?m)^diff --git ", diff)
    if not mark or start is None:
        raise SeriesError(f"{name} has no line --- with a diff behind it", "patches/README.md shows how one is written")
    return Patch(name.removesuffix(".patch"), header.strip("\n"), diff[start.start() :])


def read_series(read: Mapping[str, str]) -> list[Patch]:
    """The patches in order, from the texts of a folder by file name."""
    if "series" not in read:
        raise SeriesError("there is no file `series`", "name a folder like patches/, or a revision that has one")
    names = [line.strip() for line in read["series"].splitlines() if line.strip() and not line.startswith("#")]
    missing = [name for name in names if name not in read]
    if missing:
        raise SeriesError(f"series names {missing[0]}, which is not there", "keep series and the patches together")
    return [parse_patch(name, read[name]) for name in names]


def folder_texts(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.glob("*")) if path.name == "series" or path.suffix == ".patch"]
    return {path.name: decoded(path.read_bytes()) for path in files}


def revision_texts(revision: str) -> dict[str, str]:
    """The texts of patches/ in a revision of this repository."""
    listed = git(ROOT, "ls-tree", "--name-only", revision, "patches/").out.split()
    names = [name for name in listed if name.endswith("/series") or name.endswith(".patch")]
    return {Path(name).name: git(ROOT, "show", f"{revision}:{name}").out for name in names}


def make_repository(folder: Path) -> None:
    """Makes the files in `folder` a repository of one commit, the pristine sources."""
    git(folder, "init", "--quiet", "--initial-branch=series")
    git(folder, "add", "--force", "--all", ".")
    git(folder, *_IDENTITY, "commit", "--quiet", "--message=pristine")
    git(folder, "tag", "pristine")


def copy_touched(source: Path, patches: Iterable[Patch], folder: Path) -> None:
    """Copies those files of the tree `source` that the patches touch, and that are there, into `folder`."""
    for path in sorted({file.path for patch in patches for file in patch.files}):
        if (source / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, folder / path)


def apply(folder: Path, patch: Patch) -> None:
    """Applies `patch` to the files and the index of the repository `folder`: without fuzz, all of it or nothing."""
    done = git(folder, "apply", "--index", "--whitespace=nowarn", "-", text=patch.diff, check=False)
    if done.code:
        words = done.err.strip().splitlines()[0]
        raise SeriesError(f"{patch.name} does not apply: {words}", "scripts/dev/rebase_report tells which hunks fail")


def commit(folder: Path, patch: Patch) -> None:
    text = f"{patch.name}\n\n{patch.header}\n"
    git(folder, *_IDENTITY, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", text=text)


def read_tree(folder: Path) -> list[Patch]:
    """The commits between `pristine` and HEAD as patches. Raises SeriesError where the files differ from HEAD."""
    if git(folder, "status", "--porcelain", "--untracked-files=all").out.strip():
        raise SeriesError(f"{folder} has changes that are in no commit", "commit them, each to the patch it belongs to")
    patches = []
    for commit_id in git(folder, "rev-list", "--reverse", "pristine..HEAD").out.split():
        name, _, header = git(folder, "show", "--no-patch", "--format=%B", commit_id).out.partition("\n")
        diff = git(folder, "diff", *_DIFF, f"{commit_id}^", commit_id).out
        patches.append(Patch(name.strip(), header.strip("\n"), diff))
    return patches


def files_part(patch: Patch) -> str:
    """The header's last part: which files are new, and in how many places others are changed."""
    words = [f"{file.path} ({'new' if file.is_new else len(file.hunks)})" for file in patch.files]
    lines = ["Files:"]
    for index, word in enumerate(words):
        word += "," if index + 1 < len(words) else "."
        if len(lines[-1]) + 1 + len(word) > _FILES_WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def patch_text(patch: Patch) -> str:
    """The patch as a file; its part `Files:` is written anew."""
    header = re.split(r"(?m)^Files:", patch.header)[0].strip("\n")
    return f"{header}\n{files_part(patch)}\n---\n{patch.diff}"
