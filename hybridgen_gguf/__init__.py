"""Run GGUF models on a machine whose GPU is too small for them.

import hybridgen_gguf
with hybridgen_gguf.load("smollm2-135m") as model:
    print(model.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
    for chunk in model.stream("Once upon a time", max_tokens=40, temperature=0):
        print(chunk.text, end="")
    print(model.plan.context.threads)
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, without the 5 ms that importing it takes before Ctrl-C is looked after
if TYPE_CHECKING:
    from typing import Any

    from .batching import Done, Score, Stream
    from .errors import (
        BadFile,
        Busy,
        ConfigError,
        DoesNotFit,
        DownloadError,
        EngineError,
        EngineMismatch,
        Failed,
        HgError,
        NoSpace,
        NotFound,
        SampleError,
        TemplateError,
        UsageError,
    )
    from .generate import LanguageModel
    from .plan import Limits, Plan
    from .prompt import Message
    from .reply import Chunk, Reply, Timings, Usage
    from .request import GenerateOptions
    from .sample import SampleOptions
    from .schedule import Rules
    from .settings import Rope

__version__ = "0.1.0"

_HOMES = {
    "Chunk": "reply", "GenerateOptions": "request", "LanguageModel": "generate", "Reply": "reply",
    "Timings": "reply", "Usage": "reply", "Limits": "plan", "Plan": "plan", "Message": "prompt",
    "SampleOptions": "sample", "Rules": "schedule", "Done": "batching", "Score": "batching", "Stream": "batching",
    "Rope": "settings",
}  # fmt: skip

__all__ = [
    "BadFile",
    "Busy",
    "Chunk",
    "ConfigError",
    "DoesNotFit",
    "Done",
    "DownloadError",
    "EngineError",
    "EngineMismatch",
    "Failed",
    "GenerateOptions",
    "HgError",
    "LanguageModel",
    "Limits",
    "Message",
    "NoSpace",
    "NotFound",
    "Plan",
    "Reply",
    "Rope",
    "Rules",
    "SampleError",
    "SampleOptions",
    "Score",
    "Stream",
    "TemplateError",
    "Timings",
    "Usage",
    "UsageError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are used: `import hybridgen_gguf` loads neither numpy nor the engine."""
    if name not in __all__:
        raise AttributeError(f"module 'hybridgen_gguf' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def load(
    model: str,
    limits: Limits | None = None,
    *,
    rpc: tuple[str, ...] = (),
    rules: Rules | None = None,
    **changes: Any,
) -> LanguageModel:
    """Plans and opens `model`: a path, an alias (fetched when needed) or user/repo[:QUANT].

    `changes` replace fields of Limits, such as `n_ctx=4096` or `threads=2`. `parallel=8` answers so many requests at
    once, from any threads and from asyncio, in one context that all share; `rules` says how (schedule.Rules). Changes
    to the model are among them: `adapters=["style.gguf", ("other.gguf", 0.5)]`,
    `override_kv={"llama.expert_used_count": 1}`, `rope=Rope(freq_scale=0.5)`. Warnings of the plan are Python warnings.
    Raises HgErrors: NotFound, BadFile, DoesNotFit, UsageError, EngineError, DownloadError.
    """
    from .open import load_model

    return load_model(model, limits, rpc, changes, rules)
