"""A forked child can load a model of its own: the engine's threads are sent home before each fork.

OpenMP keeps its threads between parallel regions. A fork copies what is known of them, not the threads, so that the
child's first region would wait for ever. Knows nothing of models. Invariant: registered once in a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress

_PAUSE_SOFT = 1  # omp_pause_soft (OpenMP 5.0, 6.3.1): threads end, settings stay; they start again when needed
_LIBRARIES = ("libgomp.so.1", "libomp.so", "libomp.so.5", "libomp.dylib")


@functools.cache
def survive() -> None:
    """From now on forks end the idle OpenMP threads of the thread that forks."""
    flag = getattr(os, "RTLD_NOLOAD", 0)  # the one that the engine has loaded, and no other
    for name in _LIBRARIES if flag else ():
        with suppress(OSError, AttributeError):
            pause = ctypes.CDLL(name, mode=flag).omp_pause_resource_all
            os.register_at_fork(before=functools.partial(pause, _PAUSE_SOFT))
            return
