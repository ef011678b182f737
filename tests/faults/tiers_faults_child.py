"""Uses a model with its KV in two memories while the n-th allocation fails, for every n. Prints one JSON object.

    LD_PRELOAD=alloc_faults.so python tiers_faults_child.py HOST:PORT MODEL all|pages|pinned

A process of its own, which must outlive every fault: an abort ends it without a line.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from typing import Any

import hybridgen_gguf
from hybridgen_gguf.errors import HgError

faults = ctypes.CDLL(None)


def attempt(endpoint: str, path: str) -> dict[str, Any]:
    """What happened: an error's words, or the tokens and what had to be done without."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with hybridgen_gguf.load(
                path, n_ctx=1024, n_gpu_layers=99, kv_vram=400 << 10, flash_attention="on", rpc=(endpoint,)
            ) as model:
                reply = model.generate("the fox and the crow " * 14, temperature=0, max_tokens=8, ignore_end=True)
                tiers = reply.tiers
        except HgError as error:
            return {"error": error.what, "exit_code": error.exit_code}
    assert tiers is not None
    return {
        "tokens": list(reply.tokens),
        "told": [str(line.message) for line in told],
        "pinned": tiers.pinned,
        "huge_pages": tiers.huge_pages,
        "tiered": tiers.steps_tiered,
    }


def main() -> None:
    endpoint, path, what = sys.argv[1:]
    faults.faults_set(0, int(what == "pages"), int(what == "pinned"))
    plain = attempt(endpoint, path)
    found = {"plain": plain, "allocations": faults.faults_seen(), "left_registered": faults.faults_registered()}
    if what == "all":
        found["nth"] = []
        for at in range(1, found["allocations"] + 1):
            faults.faults_set(at, 0, 0)
            found["nth"].append(attempt(endpoint, path))
        faults.faults_set(0, 0, 0)
        found["after"] = attempt(endpoint, path)
        found["left_registered"] = faults.faults_registered()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
