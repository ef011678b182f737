"""The models of plan_gpu_stages.py: random Q4_K weights in the shapes of known models. Needs numpy and gguf."""

from __future__ import annotations

import sys
from pathlib import Path

# layers, width, FFN, heads, KV heads, vocabulary, experts, used (0: dense)
SHAPES = {
    "dense8": (32, 4096, 14336, 32, 8, 128256, 0, 0),
    "dense32": (64, 5120, 27648, 40, 8, 151936, 0, 0),
    "experts30": (48, 2048, 768, 32, 4, 151936, 128, 8),
    "tiny": (4, 512, 1024, 8, 4, 512, 0, 0),
}


def write_model(out: Path, name: str) -> None:
    """A llama, or a Qwen3 with experts, with random Q4_K weights."""
    sys.path[:0] = [str(Path(__file__).resolve().parent)]  # where it is loaded by its path, as tests do
    from synthetic_gguf import write  # late: the engine must be loaded before numpy in the processes that measure

    *shape, experts, used = SHAPES[name]
    write(out, name, tuple(shape), (experts, used))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2])
