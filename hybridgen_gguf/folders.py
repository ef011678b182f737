"""Where the user's files lie: configuration, cache and data, each asked for here and nowhere else.

    folder    holds                                            first of
    config    config.toml, models.toml                         HGGUF_HOME/config, the system's
    cache     engine/, source/, models/, profile.json          HGGUF_CACHE, HGGUF_HOME/cache, the system's
    data      tuned.json                                       HGGUF_DATA, HGGUF_HOME/data, the system's

The system's folders are platformdirs' `hgguf` ones (on Linux: $XDG_CONFIG_HOME, $XDG_CACHE_HOME and $XDG_DATA_HOME, or
~/.config, ~/.cache and ~/.local/share). Single files have variables of their own, which come before any folder:
HGGUF_CONFIG, HGGUF_MODELS_FILE, HGGUF_MODELS, HGGUF_PROFILE. Knows nothing of what is in the files.
Invariant: nothing is created; an empty variable counts as unset.
"""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "hgguf"


def config_folder() -> Path:
    """The folder of what the user writes."""
    return _chosen(None, "config") or _system("config")


def cache_folder() -> Path:
    """The folder of what can be fetched, built or measured again."""
    return _chosen("HGGUF_CACHE", "cache") or _system("cache")


def data_folder() -> Path:
    """The folder of what took long to find out."""
    return _chosen("HGGUF_DATA", "data") or _system("data")


def _chosen(variable: str | None, kind: str) -> Path | None:
    if variable and (named := os.environ.get(variable)):
        return Path(named)
    home = os.environ.get("HGGUF_HOME")
    return Path(home) / kind if home else None


def _system(kind: str) -> Path:
    import platformdirs  # 5 ms that a start with variables set need not spend

    find = {
        "config": platformdirs.user_config_path,
        "cache": platformdirs.user_cache_path,
        "data": platformdirs.user_data_path,
    }[kind]
    return find(_NAME, appauthor=False)
