"""Defaults from the user's configuration file, below flags and environment: `config.toml`, a table for each verb.

    [run]
    threads = 4
    cache_type_k = "q8_0"

Keys are the long flags with `_` for `-`, each of a flag's long names. HGGUF_CONFIG names another file.
Invariant: an unknown key is an error.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..folders import config_folder
from ..named_files import open_named

_LONGEST = 1 << 20  # bytes: somebody may name /dev/zero


def config_path() -> Path:
    """Where the file is looked for."""
    return Path(os.environ.get("HGGUF_CONFIG") or config_folder() / "config.toml")


def read_config(known: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Verb → parameter → value. `known`: verb → key → parameter. Raises ConfigError; no file is no error."""
    path = config_path()
    try:
        with open_named(path) as file:
            tables = tomllib.loads(file.read(_LONGEST).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("HGGUF_CONFIG"):
            raise ConfigError(f"HGGUF_CONFIG names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from None
    values: dict[str, dict[str, Any]] = {}
    for verb, table in tables.items():
        if verb not in known or not isinstance(table, dict):
            raise ConfigError(
                f"the configuration {path} has no place for '{verb}'", f"tables: {', '.join(sorted(known))}"
            )
        for key, value in table.items():
            if key not in known[verb]:
                near = difflib.get_close_matches(key, known[verb], 2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"see `hgguf {verb} --help`"
                raise ConfigError(f"'{key}' in [{verb}] of {path} is no flag of `hgguf {verb}`", hint)
            if isinstance(value, dict):
                raise ConfigError(f"'{key}' in [{verb}] of {path} is a table, not a value", "write key = value")
            values.setdefault(verb, {})[known[verb][key]] = value
    return values
