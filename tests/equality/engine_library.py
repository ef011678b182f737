"""The engine under test as a plain ctypes library, or a skip that says why there is none."""

from __future__ import annotations

import ctypes
import functools
import os

import pytest

from hybridgen_gguf.engine import library
from hybridgen_gguf.errors import EngineError


@functools.cache
def engine_llama() -> ctypes.CDLL:
    """libllama of the engine that the program would use."""
    try:
        folder = library.find()
    except EngineError as error:
        pytest.skip(f"needs the engine: {error.what}")
    return ctypes.CDLL(str(folder / "libllama.so"), mode=os.RTLD_GLOBAL)
