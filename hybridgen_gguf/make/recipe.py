"""What a file was made from and how: the recipe inside its metadata, and the manifest beside it.

Knows of the engine its commit alone, and that it takes text values of at most 127 bytes: a longer one is spread over
numbered keys.
Invariant: equal inputs, options and tool give equal entries; nothing in them depends on paths, clock or machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine.pin import COMMIT
from .target import write_file

#: stands for a digest that is not known yet
UNKNOWN = "0" * 64
_LONGEST = 120
_PREFIX = "hgguf.recipe."


def tool_version() -> str:
    """This program's version and the engine's commit."""
    try:
        version = metadata.version("hybridgen-gguf")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return f"hgguf {version}, llama.cpp {COMMIT}"


def entries(recipe: Mapping[str, str], prefix: str = "hgguf.recipe.") -> dict[str, str]:
    """The metadata keys for a recipe: PREFIX and the name, or `NAME.00`, `NAME.01`, … when the text is long."""
    found: dict[str, str] = {}
    for name, text in recipe.items():
        pieces = _pieces(text)
        if len(pieces) == 1:
            found[prefix + name] = text
        else:
            found.update({f"{prefix}{name}.{index:02d}": piece for index, piece in enumerate(pieces)})
    return found


def recipe_of(header: Mapping[str, Any]) -> dict[str, str]:
    """The recipe in a file's metadata; empty when it has none."""
    found: dict[str, str] = {}
    for key in sorted(key for key in header if key.startswith(_PREFIX)):
        name = key.removeprefix(_PREFIX).partition(".")[0]
        found[name] = found.get(name, "") + str(header[key])
    return found


def place(name: str) -> dict[str, str]:
    """The metadata key of the recipe's digest `name`, and the text that stands there until it is known."""
    return {"key": _PREFIX + name, "unknown": UNKNOWN}


def canonical(options: Mapping[str, Any]) -> str:
    """Options as JSON in one fixed spelling."""
    return json.dumps(options, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def manifest_path(target: Path) -> Path:
    """Where the manifest of `target` lies."""
    return target.with_name(target.name + ".json")


def write_manifest(target: Path, content: Mapping[str, Any]) -> Path:
    """Writes the manifest of `target` beside it; returns its path."""
    path = manifest_path(target)
    write_file(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())
    return path


def add_to_manifest(path: Path, more: Mapping[str, Any]) -> None:
    """Adds entries to a manifest that is there already."""
    content = json.loads(path.read_text(encoding="utf-8")) | more
    write_file(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def _pieces(text: str) -> list[str]:
    """`text` in parts whose UTF-8 form the engine takes whole."""
    pieces, current = [], ""
    for char in text:
        if len((current + char).encode()) > _LONGEST:
            pieces.append(current)
            current = ""
        current += char
    return [*pieces, current]
