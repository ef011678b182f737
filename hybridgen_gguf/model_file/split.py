"""A model file as a whole: one GGUF file, or every part of a `NAME-0000N-of-0000M.gguf` set, whichever was named.

Any part, or a link to one under another name, opens the whole set; a missing part is named. Knows no model.
Invariant: `ModelFile.paths[0]` is the file to give to the engine, which finds the other parts by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..errors import BadFile, HgError, NotFound
from ..printable import printable
from ..units import round_up
from .header import MAGIC, Header, TensorInfo, Value, read_header

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class ModelFile:
    """`headers` and `paths` in the order of the parts; `metadata` is the first part's."""

    paths: tuple[Path, ...]
    headers: tuple[Header, ...]

    @property
    def path(self) -> Path:
        """The file that the engine opens."""
        return self.paths[0]

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self.headers[0].metadata

    def with_metadata(self, values: Mapping[str, Value]) -> ModelFile:
        """The same with some values other than in the file."""
        first = replace(self.headers[0], metadata={**self.metadata, **values})
        return ModelFile(self.paths, (first, *self.headers[1:]))

    @cached_property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors of all parts. Each `offset` counts from the data of its own part."""
        return tuple(tensor for header in self.headers for tensor in header.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all parts on disk."""
        return sum(header.file_bytes for header in self.headers)


def open_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """The whole model that `path` belongs to. Raises NotFound for a missing file or part, BadFile for a bad one."""
    path = _name_for_all(Path(path))
    try:
        header = read_header(path)
    except NotFound as error:
        raise _nearby(path) or error from None
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return ModelFile((path,), (header,))
    paths = _part_paths(path, header, count)
    headers = tuple(header if part == path else _read_part(part, index, count) for index, part in enumerate(paths))
    whole = ModelFile(paths, headers)
    _check_set(whole)
    return whole


def _name_for_all(path: Path) -> Path:
    """/dev/stdin and /proc/self/fd/9 mean another file in each process, and the engine checks files in its own."""
    folder = path.absolute().parent.resolve()
    own = (folder == Path("/dev") or folder.is_relative_to("/proc")) and path.is_file()
    return path.resolve() if own else path


def _nearby(path: Path) -> HgError | None:
    """A better error when a missing file is one part of a set whose other parts are there."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[2]) == 0:
        return None
    others = [p for p in _siblings(path, match) if p != path and p.exists()]
    if not others:
        return None
    missing = f"part {int(match[2])} of {int(match[3])} is missing: {printable(str(path))}"
    return NotFound(missing, f"put it beside {printable(others[0].name)}")


def _siblings(path: Path, match: re.Match[str]) -> tuple[Path, ...]:
    count = min(int(match[3]), 99999)
    return tuple(path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, count + 1))


def _part_paths(path: Path, header: Header, count: int) -> tuple[Path, ...]:
    number = header.metadata.get("split.no")
    if _another_follows(header):
        raise BadFile(
            f"{printable(str(path))} holds several parts of a model of {count}, one behind the other",
            "parts are not joined like that: keep them as files of their own, or use llama.cpp's "
            "llama-gguf-split --merge",
        )
    if not isinstance(number, int) or not 0 <= number < count:
        raise BadFile(f"{printable(str(path))} has a bad split.no: {number} of {count} parts")
    for candidate in (path, path.resolve()):
        match = _PART.fullmatch(candidate.name)
        if match and int(match[3]) == count:
            if int(match[2]) != number + 1:
                raise BadFile(
                    f"{printable(str(path))} is named part {int(match[2])} but holds part {number + 1} of {count}",
                    "give the parts the names they were published under",
                )
            return _siblings(candidate, match)
    raise BadFile(
        f"{printable(str(path))} is part {number + 1} of {count} of a model, and its name does not lead to the others",
        f"name the parts NAME-00001-of-{count:05d}.gguf and so on, in one folder",
    )


def _another_follows(header: Header) -> bool:
    """Whether another GGUF file begins where this one ends (`cat` was used to join parts)."""
    last = header.tensors[-1] if header.tensors else None
    end = header.data_offset + (last.offset + last.bytes if last else 0)
    with header.path.open("rb") as file:
        for place in {end, round_up(end, header.alignment)}:
            file.seek(place)
            if file.read(len(MAGIC)) == MAGIC:
                return True
    return False


def _read_part(path: Path, index: int, count: int) -> Header:
    try:
        header = read_header(path)
    except NotFound:
        raise NotFound(
            f"part {index + 1} of {count} is missing: {printable(str(path))}", "fetch it into the same folder"
        ) from None
    found = header.metadata.get("split.no"), header.metadata.get("split.count")
    if found != (index, count):
        raise BadFile(f"{printable(str(path))} is not part {index + 1} of {count} of the same model")
    return header


def _check_set(whole: ModelFile) -> None:
    names = [tensor.name for tensor in whole.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadFile(f"{printable(str(whole.path))}: tensor '{printable(twice)}' is in two parts of the set")
    expected = whole.metadata.get("split.tensors.count", len(names))
    if expected != len(names):
        raise BadFile(
            f"{printable(str(whole.path))}: the parts hold {len(names)} tensors, the first says {expected}",
            "the parts belong to different models; fetch them again",
        )
