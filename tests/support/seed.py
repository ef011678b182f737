"""The seed of tests with random inputs: the same in every run, so that a change is judged by itself and not by luck.

`scripts/dev/fuzz` (HGGUF_FUZZ_EXAMPLES) draws another; HGGUF_TEST_SEED repeats one that failed.
"""

from __future__ import annotations

import os
import secrets

FUZZING = "HGGUF_FUZZ_EXAMPLES" in os.environ
# Processes that pytest-xdist starts inherit it; HGGUF_SEED is the sampler's.
SEED = int(os.environ.setdefault("HGGUF_TEST_SEED", str(secrets.randbelow(1 << 32) if FUZZING else 20261130)))
