"""The verbs about files and the engine: inspect, validate, pull, models, engine. Data from below, text by show.py.

Invariant: no verb here reads weights, except `validate`, or runs anything that a file contains.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HgError, NotFound
from ..printable import printable
from ..units import format_size
from . import show

if TYPE_CHECKING:
    from ..model_file.validation import FileReport

_MOST_SHOWN = 4000  # rows of a table; models have up to some 2,000 tensors, and a hostile file can have 65,000


def _local_file(text: str) -> Path:
    """The file that `text` names, without fetching anything."""
    from ..models.download import find_local
    from ..models.registry import resolve

    ref = resolve(text)
    if ref.path is not None:
        return ref.path
    path = find_local(ref)
    if path is None:
        raise NotFound(f"'{text}' has not been fetched yet", f"hgguf pull {text}")
    return path


def pull_verb(model: str, as_json: bool) -> None:
    """`hgguf pull`."""
    from ..models.download import pull
    from ..models.registry import resolve

    ref = resolve(model)
    if ref.path is not None:
        raise NotFound(f"'{model}' is a file here, there is nothing to fetch", "`hgguf models` lists the names")
    with show.progress(f"fetching {model}", sizes=True) as progress:
        pulled = pull(ref, progress)
    if as_json:
        show.data({"path": str(pulled.path), "sha256": pulled.sha256, "bytes": pulled.bytes})
    else:
        show.answer(f"{pulled.path}\n")
        show.note(f"{format_size(pulled.bytes)}, sha256 {pulled.sha256}")


def models_verb(as_json: bool) -> None:
    """`hgguf models`."""
    from ..models.download import find_local
    from ..models.registry import load_registry

    entries = load_registry().entries
    here = {entry.alias: find_local(entry.ref) for entry in entries}
    if as_json:
        keys = ("alias", "title", "licence", "quant", "context", "bytes", "sha256")
        rows = [
            {key: getattr(entry, key) for key in keys} | {"path": str(here[entry.alias]) if here[entry.alias] else None}
            for entry in entries
        ]
        show.data({"models": rows})
        return
    show.table(
        "",
        ("name", "type", "size", "context", "here", "licence"),
        [
            (
                *(e.alias, e.quant, format_size(e.bytes) if e.bytes else "?", e.context or "?"),
                *("yes" if here[e.alias] else "", e.licence),
            )
            for e in entries
        ],
        right=(2, 3),
    )


def engine_verb(as_json: bool) -> None:
    """`hgguf engine`."""
    from ..engine.handles import start

    library = start()
    devices = library.devices()
    if as_json:
        show.data({
            "path": str(library.folder),
            "commit": library.commit,
            "patched": library.patched,
            "patches": list(library.patches),
            "switches": {s.name: {"value": s.value, "values": list(s.values)} for s in library.switches()},
            "backends": list(library.backends()),
            "devices": [asdict(device) for device in devices],
        })  # fmt: skip
        return
    rows: list[tuple[str, str]] = [("path", str(library.folder)), ("commit", library.commit)]
    rows += [("patch", name) for name in library.patches]
    rows += [("switch", f"{s.name} = {s.value} ({' or '.join(s.values)})") for s in library.switches()]
    rows += [("backend", name) for name in library.backends()]
    rows += [("device", f"{d.name}: {d.description}, {format_size(d.memory_total)}") for d in devices]
    show.table("", ("what", "value"), rows)


def inspect_verb(model: str, as_json: bool) -> None:
    """`hgguf inspect`."""
    from ..model_file.inspection import inspect_file

    seen = inspect_file(_local_file(model))
    if as_json:
        show.data(seen.as_json())
        return
    show.table("", ("model", ""), seen.summary())
    show.answer("\nmetadata\n" + "\n".join(seen.lines()) + "\n\n")
    tensors = seen.file.tensors
    rows = [
        (printable(t.name), t.type, " x ".join(map(str, t.shape)), format_size(t.bytes)) for t in tensors[:_MOST_SHOWN]
    ]
    show.table("", ("tensor", "type", "shape", "bytes"), rows, right=(3,))
    if len(tensors) > _MOST_SHOWN:
        show.answer(f"and {len(tensors) - _MOST_SHOWN:,} more (--json has all)\n")


def validate_verb(files: list[str], as_json: bool, check_tensors: bool) -> int:
    """`hgguf validate`. 0 when every file is sound, 4 when one is missing, else 1."""
    from ..engine.child import Child
    from ..model_file.validation import FileReport, validate_file

    reports: list[FileReport] = []
    code = 0
    with Child() as child, show.status("reading") as say:
        for text in files:
            say(printable(text))
            try:
                report = validate_file(_local_file(text), engine_check=child.check, check_tensors=check_tensors)
                code = code or (0 if report.ok else 1)
            except HgError as error:
                report = FileReport(Path(text), False, (error.what,))
                code = code or error.exit_code
            reports.append(report)
    if as_json:
        show.data({"files": [_as_json(report) for report in reports]})
        return code
    for report in reports:
        if report.ok:
            show.answer(f"{report.path}: ok{report.kind and f' ({report.kind})'}\n")
        for problem in report.problems:
            named = str(report.path) in problem
            show.note(f"error: {problem}" if named else f"error: {report.path}: {problem}")
    return code


def _as_json(report: FileReport) -> dict[str, object]:
    found = {"path": str(report.path), "ok": report.ok, "problems": list(report.problems)}
    return found | {"kind": report.kind} if report.kind else found
