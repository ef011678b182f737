"""What the engine's words mean when it refuses or gives up while a model is opened: whose fault, and what to do.

The table knows every message of the pinned engine's loader (a test walks llama-model-loader.cpp, llama-model.cpp,
llama-vocab.cpp, llama-hparams.cpp, llama.cpp and gguf.cpp). Invariant: a file is blamed only for what lies in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """`cause`: file, newer, kind, memory, disk, device, asked or ours; `hint`: one line for the user."""

    cause: str
    hint: str


FILE = Refusal("file", "the file is damaged or hostile")
NEWER = Refusal("newer", "this engine does not know it: the file may be newer than the engine, or of a fork of it")
KIND = Refusal("kind", "give a language model: this file is of another kind")
MEMORY = Refusal("memory", "close other programs, use a smaller model, or keep less on the device (-ngl)")
DISK = Refusal("disk", "free some space and try again")
OPENING = Refusal("disk", "check the path, its rights, and the disk")
DEVICE = Refusal("device", "see `hgguf engine` for the devices")
ASKED = Refusal("asked", "the options ask for what this model or engine does not have")
OURS = Refusal("ours", "please report this, with the name of the model")
SHARDS = Refusal("file", "all parts of the model must lie in one folder, and the first is the one to open")

# First match counts. Parts of messages, as the engine's source has them.
_TABLE: tuple[tuple[str, Refusal], ...] = (
    (r"bad_alloc|unable to allocate|failed to allocate|cannot allocate|out of memory|failed to (create|initialize) ggml"
     r"|memory size overflow", MEMORY),
    (r"fputc|fwrite|for writing GGUF|write GGUF data", DISK),
    (r"failed to open GGUF file|file is NULL|failed to open", OPENING),
    (r"split|illegal split|list of splits", SHARDS),
    (r"unknown (model )?architecture|unsupported model architecture|no longer supported|only supports up to version"
     r"|extremely large|unknown tokenizer|unknown pre-tokenizer|unsupported tensor type|unsupported vocab"
     r"|invalid ggml type|missing test for op|missing tensor info mapping|--no-mtp", NEWER),
    (r"CLIP cannot be used|does not implement", KIND),
    (r"SPLIT_MODE|main_gpu|tensor split|override|not implemented for architecture", ASKED),
    (r"no CPU backend|no backends|backend reg|split buffers|buffer type|needs >= 1 devices", DEVICE),
    (r"unknown load mode|exactly one out|out of bounds \(n_layer|used with(out)? a layer number|is too large for the"
     r"|too many tokens|exceeds int32_t|fatal error|invalid layer|too many tensors created", OURS),
    (r"key |keys? |key-value|tensor|array|magic|version|header|string length|alignment|aligned|charsmap|merges|vocab"
     r"|tokenizer|scalar|n_rot|expert|[Bb]yte token|hyperparameters|failed to load model|invalid model|corrupted"
     r"|elements|gguf type|invalid type|must be type|data section|error loading model|XCDA|toktypes|scores"
     r"|N_MAX", FILE),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), meaning) for pattern, meaning in _TABLE)

# Where an assertion stood says what it was about: these parse files, the others compute.
_READERS = re.compile(r"\b(gguf|llama-model-loader|llama-model|llama-vocab|llama-hparams|llama-arch|unicode)\.cpp:\d+")
_REMOTE = re.compile(r"ggml-rpc\.cpp:\d+|[Rr]emote RPC server")


def refusal_of(words: str) -> Refusal:
    """What a message of the engine means."""
    for pattern, meaning in _COMPILED:
        if pattern.search(words):
            return meaning
    return OURS


def abort_hint(words: str) -> str:
    """What to do after an abort (GGML_ASSERT, an exception that nobody caught) with these words; maybe none."""
    if _REMOTE.search(words):
        return "the RPC server ended or refused: see what it says"
    if _READERS.search(words) or not words.strip():
        return FILE.hint
    if "GGML_A" in words:
        return OURS.hint
    return refusal_of(words).hint
