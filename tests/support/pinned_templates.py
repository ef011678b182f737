"""The chat templates of the pinned engine source (models/templates), read from the archive that setup fetched."""

from __future__ import annotations

import functools
import os
import tarfile
from pathlib import Path

import pytest
from platformdirs import user_cache_path


@functools.cache
def pinned_templates() -> dict[str, str]:
    """File name → Jinja text. Skips the test where setup left no archive."""
    cache = Path(os.environ.get("HGGUF_CACHE") or user_cache_path("hgguf", appauthor=False))
    archives = sorted((cache / "source").glob("llama_cpp_python-*.tar.gz"))
    if not archives:
        pytest.skip("the engine's source archive is not in the cache: scripts/setup fetches it")
    found = {}
    with tarfile.open(archives[-1]) as archive:
        for member in archive:
            if "/vendor/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).name] = file.read().decode("utf-8")
    return found
