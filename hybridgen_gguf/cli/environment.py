"""Environment variables that no flag has: for docs/cli.md. Those of flags stand with their flags.

Knows what each does, not how. Invariant: every HGGUF_ name in the package, the scripts and the patches is here or
belongs to a flag; a test looks.
"""

from __future__ import annotations

from typing import Final

#: heading → variable → what it does
VARIABLES: Final[dict[str, dict[str, str]]] = {
    "Where things lie": {
        "HGGUF_HOME": "One folder for configuration, cache and data, in place of the system's.",
        "HGGUF_CONFIG": "The configuration file.",
        "HGGUF_CACHE": "The cache folder: engine, fetched models, this machine's profile.",
        "HGGUF_DATA": "The data folder: what `tune` remembered.",
        "HGGUF_MODELS": "The folder of fetched models.",
        "HGGUF_MODELS_FILE": "A file in the form of models.toml with names of your own; its entries come before ours.",
        "HGGUF_PROFILE": "The file of what `profile` measured.",
        "HGGUF_ENGINE": "The folder of the engine's libraries. LLAMA_CPP_LIB_PATH is read after it.",
        "HGGUF_CONVERTER": "The folder of llama.cpp sources whose converter `convert` runs.",
    },
    "Off switches": {
        "HGGUF_CPU_ATTENTION": "`stock`: llama.cpp's own CPU attention.",
        "HGGUF_CPU_MATRIX": "`stock`: llama.cpp's own CPU matrix products, whose last bits depend on rows and threads.",
        "HGGUF_KV_OVERLAP": "`off`: CPU and device take turns where KV lies in two memories.",
        "HGGUF_KV_PREFETCH": "`off`: prompts copy each layer's host rows when they are needed, not one layer ahead.",
        "HGGUF_PRE_TOKENIZER": "`stock`: text is cut by std::regex, which long runs of a character can crash.",
        "HGGUF_QUANTIZE": "`stock`: scales are searched one block at a time. The bytes are the same.",
        "HGGUF_SAMPLER": "`numpy`: tokens are drawn by NumPy code, not the engine's. The tokens are the same.",
        "HGGUF_DEVICE_SAMPLER": "`off`: all logits are copied from the device, not its top candidates.",
    },
    "Others": {
        "HGGUF_MEMORY_CHECK": "`off`: KV in host memory is taken without asking whether so much is free.",
        "HGGUF_DEBUG": "`1`: tracebacks, and the engine's own log; as `--debug`.",
        "HGGUF_CUDA": "For `scripts/setup`: build the engine with CUDA: `auto`, `on` or `off`.",
    },
}
