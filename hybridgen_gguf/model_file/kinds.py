"""What kind of model a file is, from its header: most write text, some do something else, some are only a part.

The architectures are those of the pinned llama.cpp (llama-arch.cpp, llama_model_has_encoder, llm_arch_is_diffusion).
Invariant: a file of a kind that writes text step by step gives None.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BadFile
from ..printable import printable
from .split import ModelFile


@dataclass(frozen=True, slots=True)
class Kind:
    """`name` for programs; `what` completes "this is ..."; `hint` says what to do instead."""

    name: str
    what: str
    hint: str


_LANGUAGE = "give a language model"
_EMBEDDING = Kind("embedding", "an embedding model: it turns text into vectors and writes none", _LANGUAGE)
_DIFFUSION = Kind(
    "diffusion", "a diffusion model: it writes all tokens at once, in rounds",
    "llama.cpp's llama-diffusion-cli runs it",
)  # fmt: skip
_DRAFT = Kind("draft", "a draft head: it only guesses ahead for the model that it was made for", "give that model")
_ADAPTER = Kind("adapter", "an adapter (LoRA): a change to another model's weights", "give the model it belongs to")
_PROJECTOR = Kind("projector", "a projector for pictures or sound (mmproj)", "give the language model it belongs to")
_MATRIX = Kind("imatrix", "an importance matrix", "`hgguf quantize --imatrix` takes it")
_VOCABULARY = Kind("vocabulary", "a vocabulary alone, without weights", _LANGUAGE)

_ARCHITECTURES = {
    "t5": Kind(
        "encoder-decoder", "an encoder-decoder model (T5): it reads a whole text first and then writes another",
        "that is not supported here; llama.cpp's llama-completion runs it",
    ),
    "wavtokenizer-dec": Kind("vocoder", "a vocoder: it turns codes into sound", _LANGUAGE),
    "clip": _PROJECTOR,
    "imatrix": _MATRIX,
    **dict.fromkeys(("eagle3", "dflash"), _DRAFT),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(
        ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
         "gemma-embedding", "t5encoder", "llama-embed"), _EMBEDDING,
    ),
}  # fmt: skip
_GENERAL_TYPES = {"adapter": _ADAPTER, "mmproj": _PROJECTOR, "imatrix": _MATRIX}
_POOLING_RANK = 4  # enum llama_pooling_type (llama.h); 0: none


def kind_of(file: ModelFile) -> Kind | None:
    """What the file is, where that is no model that writes text; None for those that do, and for unknown ones."""
    architecture = str(file.metadata.get("general.architecture", ""))
    if kind := _GENERAL_TYPES.get(str(file.metadata.get("general.type", ""))):
        return kind
    pooling = file.metadata.get(f"{architecture}.pooling_type")
    if pooling == _POOLING_RANK:
        return Kind("reranker", "a reranker: it gives a score to a pair of texts and writes none", _LANGUAGE)
    if kind := _ARCHITECTURES.get(architecture):
        return kind
    if isinstance(pooling, int) and pooling > 0:
        return _EMBEDDING
    return None if file.tensors else _VOCABULARY


def check_writes(file: ModelFile) -> None:
    """Raises BadFile for a file that cannot be asked to read a text and go on with it."""
    if kind := kind_of(file):
        raise BadFile(f"{printable(str(file.path))} is {kind.what}", kind.hint)
