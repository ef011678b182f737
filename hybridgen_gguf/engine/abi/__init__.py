"""Every C declaration that the binding lacks, once, under its C line.

ggml   ggml.h, ggml-backend.h, ggml-cpu.h, ggml-rpc.h, gguf.h
llama  llama.h
hg     our own headers: hg.h, hg-api.h, hg-attention.h, hg-grammar.h, hg-sample.h, hg-tiers.h; only our engine has them

Knows no policy. Each table belongs to one library; `declare` gives its functions their types. The handles that they are
declared on (`library.Library`) are ours alone, because the binding has declarations of its own on its handle.
Invariant: no function of the engine is called by this package without argument types.
"""

from __future__ import annotations

import ctypes

Table = dict[str, tuple[object, tuple[object, ...]]]


def declare(library: ctypes.CDLL, table: Table) -> bool:
    """Gives the functions of `table` their types. False when the library lacks one of them."""
    for name, (result, arguments) in table.items():
        function = getattr(library, name, None)
        if function is None:
            return False
        function.restype = result
        function.argtypes = arguments
    return True
