"""Flags that say which model. `ModelFlags.name` is what the modules below take.

Invariant: "no model was given" is said here and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from ...errors import UsageError
from .spread import argument, flag

MODEL = "Model"
_HUB_ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/\s]+/[^/\s]+)/(?:resolve|blob)/main/([^?\s]+\.gguf)(?:\?\S*)?"
)


@dataclass(frozen=True)
class ModelFlags:
    """A file, an alias or a repository of the Hub, as a word or under llama.cpp's flags."""

    model: Annotated[
        str | None, argument("MODEL", "A GGUF file, an alias (see `hgguf models`), or user/repo[:QUANT] on the Hub.")
    ] = None
    model_flag: Annotated[
        str | None, flag(MODEL, "The model, as a flag.", "-m", "--model", llama="MODEL", metavar="MODEL")
    ] = None
    hf_repo: Annotated[
        str | None,
        flag(
            MODEL,
            "The model, as user/repo[:QUANT] on the Hub.",
            "-hf",
            "-hfr",
            "--hf-repo",
            llama="HF_REPO",
            metavar="REPO",
        ),
    ] = None
    hf_file: Annotated[
        str | None, flag(MODEL, "With -hf: the file in it.", "-hff", "--hf-file", llama="HF_FILE", metavar="FILE")
    ] = None
    model_url: Annotated[
        str | None,
        flag(
            MODEL,
            "The model, by the address of a GGUF file on the Hub.",
            "-mu",
            "--model-url",
            llama="MODEL_URL",
            metavar="URL",
        ),
    ] = None

    def name(self) -> str:
        """What `models.registry.resolve` takes. Raises UsageError when there is none, or two that differ."""
        if self.hf_file and not self.hf_repo and not self.model:
            raise UsageError(f"-hff {self.hf_file} needs a repository", "give it with -hf user/repo")
        named = [self.model or self.model_flag, _hub(self.hf_repo, self.hf_file), _of_address(self.model_url)]
        found = [name for name in named if name]
        if not found:
            raise UsageError("no model was given", "give a file, an alias (see `hgguf models`) or user/repo")
        if self.model and len(found) > 1:
            raise UsageError(f"two models were given: {found[0]} and {found[1]}", "leave one of them out")
        return found[0]


def _hub(repo: str | None, file: str | None) -> str:
    if not repo:
        return ""
    return f"{repo.partition(':')[0]}:{file}" if file else repo


def _of_address(address: str | None) -> str:
    if not address:
        return ""
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        hint = "fetch the file (curl -LO URL) and give its name, or give user/repo of a model on the Hub"
        raise UsageError(f"-mu {address} is not the address of a GGUF file on huggingface.co", hint)
    return f"{match[1]}:{match[2]}"
