"""Defaults from the user's configuration file, below flags and environment: `config.toml`, a table for each verb.

    [run]
    threads = 4
    cache_type_k = "q8_0"

Keys are the long flags with `_` for `-`. HGGUF_CONFIG names another file. Invariant: an unknown key is an error.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from .errors import ConfigError


def config_path() -> Path:
    """Where the file is looked for."""
    chosen = os.environ.get("HGGUF_CONFIG")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hgguf" / "config.toml"


def read_config(known: dict[str, set[str]]) -> dict[str, dict[str, Any]]:
    """Verb → parameter → value. `known`: the parameters of each verb. Raises ConfigError; no file is no error."""
    path = config_path()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("HGGUF_CONFIG"):
            raise ConfigError(f"HGGUF_CONFIG names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from None
    for verb, table in tables.items():
        if verb not in known or not isinstance(table, dict):
            raise ConfigError(
                f"the configuration {path} has no place for '{verb}'", f"tables: {', '.join(sorted(known))}"
            )
        for key in table:
            if key not in known[verb]:
                raise ConfigError(
                    f"'{key}' in [{verb}] of {path} is no flag of `hgguf {verb}`", f"see `hgguf {verb} --help`"
                )
    return tables
