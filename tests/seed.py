"""The seed of tests with random inputs: the same in every run, so that a change is judged by itself and not by luck.

`scripts/fuzz` (HGGUF_FUZZ_EXAMPLES) draws another; HGGUF_SEED repeats one that failed.
"""

from __future__ import annotations

import os
import secrets

FUZZING = "HGGUF_FUZZ_EXAMPLES" in os.environ
SEED = int(os.environ.get("HGGUF_SEED") or (secrets.randbelow(1 << 32) if FUZZING else 20261130))
