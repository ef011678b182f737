"""Where a result goes: checks before work starts, a scratch name in the same folder, publication by rename.

Knows paths, not models. Invariant: the target's name holds either what it held before or the finished, synced result.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import BadFile, NoSpace, NotFound, UsageError
from ..named_files import open_named
from ..printable import printable
from ..units import format_size

_BESIDE = (".json", ".partial")  # the manifest, and what an interrupted imatrix has counted
_SCRATCH = re.compile(r"\.hgguf-[0-9a-f]{12}-(\d+)\.(?:part|work)")


def shown(path: Path) -> str:
    """A path as text that is safe on a terminal."""
    return printable(str(path))


def check_source(path: Path) -> None:
    """Raises NotFound or BadFile unless `path` is a readable file or folder."""
    try:
        if path.is_dir():
            return
        with open_named(path):
            pass
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise NotFound(f"{shown(path)} does not exist") from None
    except OSError as error:
        raise BadFile(f"{shown(path)} cannot be read: {error.strerror}") from None


def check_target(target: Path, inputs: Iterable[Path]) -> None:
    """Refuses a target that is an input under any name, lies inside an input folder, is a folder, or cannot be written.

    Nothing is opened for writing except a scratch file of our own, which is removed again.
    """
    written = (target, *(target.with_name(target.name + suffix) for suffix in _BESIDE)) if target.name else (target,)
    for source in inputs:
        for path in written:
            if _same(path, source):
                raise UsageError(f"the output {shown(path)} is the input {shown(source)}", "give another output name")
        if source.is_dir() and _inside(target, source):
            raise UsageError(
                f"the output {shown(target)} lies inside the input folder {shown(source)}", "write it elsewhere"
            )
    if target.is_dir():
        raise UsageError(f"the output {shown(target)} is a folder", "give a file name in it")
    if (target.exists() and not target.is_file()) or _names_a_stream(target):
        raise UsageError(f"the output {shown(target)} is not a regular file", "give a file name in a folder")
    if not target.parent.is_dir():
        what = "is not a folder" if target.parent.exists() else "does not exist"
        raise NotFound(f"the output folder {shown(target.parent)} {what}", "make it first, or write elsewhere")
    probe = scratch_for(target)
    with _naming_faults(target):
        probe.touch()
        probe.unlink()


def check_room(target: Path, needed: int) -> None:
    """Raises NoSpace when the target's disk has fewer than `needed` bytes free."""
    free = free_bytes(target.parent)
    if free < needed:
        raise NoSpace(
            f"{shown(target)} needs {format_size(needed)}, and its disk has {format_size(free)} free",
            "free some space, or write to another disk",
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of `folder`."""
    return shutil.disk_usage(folder).free


def scratch_for(target: Path) -> Path:
    """The name in the target's folder that this process writes to before publishing."""
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]
    return target.parent / f".hgguf-{digest}-{os.getpid()}.part"


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """The name of a folder beside the target for files on the way. Who needs it makes it; it is removed at the end."""
    folder = scratch_for(target).with_suffix(".work")
    try:
        yield folder
    finally:
        remove(folder)


def sweep(target: Path) -> list[Path]:
    """Removes scratch files that processes no longer alive left for this target; returns what was removed."""
    removed = []
    prefix = scratch_for(target).name.rpartition("-")[0]
    for path in target.parent.glob(f"{prefix}-*"):
        match = _SCRATCH.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        with contextlib.suppress(OSError):
            remove(path)
            removed.append(path)
    return removed


def starts_again(target: Path) -> tuple[str, ...]:
    """Sweeps, and what to tell when something was left."""
    told = "an earlier run for this output was interrupted; it starts again from the beginning"
    return (told,) if sweep(target) else ()


def remove(path: Path) -> None:
    """Deletes a scratch file or folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(scratch: Path, target: Path) -> None:
    """Syncs the finished `scratch` file to the disk and renames it to `target`. Raises NoSpace."""
    with _naming_faults(target):
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(target)
        sync_folder(target.parent)


def write_file(target: Path, data: bytes) -> None:
    """Writes a small file whole or not at all."""
    scratch = scratch_for(target)
    try:
        with _naming_faults(target), scratch.open("wb") as file:
            file.write(data)
        publish(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _naming_faults(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file would be larger than this account or file system allows",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "no permission to write in its folder",
            errno.EPERM: "no permission to write in its folder",
            errno.ENAMETOOLONG: "the name is too long",
        }.get(error.errno or 0, error.strerror or "the system refused")
        raise NoSpace(f"{shown(target)} cannot be written: {reason}", "write to another folder") from None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _names_a_stream(target: Path) -> bool:
    """`-`, /dev/stdout, /proc/self/fd/1: a rename would put a file in the place of the system's own name."""
    folder = target.absolute().parent.resolve()
    return str(target) == "-" or folder == Path("/dev") or folder.is_relative_to("/proc")


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
