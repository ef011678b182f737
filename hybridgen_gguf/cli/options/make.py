"""Flags of the verbs that make files: convert, quantize, imatrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .output import DryRun, Json
from .place import PlaceFlags
from .spread import argument, plain, subset

TYPES, TEXT, TRUST, WORK = "Types", "Text that is read", "Trust", "Work"

JobThreads = Annotated[int, plain(WORK, "CPU threads; 0: all usable cores.", "-t", "--threads", least=0, most=1024)]
Output = Annotated[Path, argument("OUTPUT", "GGUF file to write.")]

#: the flags of PlaceFlags that mean something where a text is read in chunks
ReadingFlags: Any = subset(
    "ReadingFlags",
    PlaceFlags,
    (
        *("n_gpu_layers", "vram", "ram", "threads", "threads_batch", "override_tensor", "n_cpu_moe", "device"),
        *("split_mode", "tensor_split", "main_gpu", "no_kv_offload", "mlock", "no_mmap", "rpc"),
    ),
)


@dataclass(frozen=True)
class ConvertFlags:
    """A folder of Hugging Face's and the file to make of it."""

    folder: Annotated[Path, argument("FOLDER", "Folder of a Hugging Face model.")]
    output: Output
    type_name: Annotated[
        str, plain(TYPES, "Type of the weights; auto: as they are.", "--type", metavar="f16|bf16|q8_0|f32|auto")
    ] = "auto"
    pre_tokenizer: Annotated[
        str, plain(TYPES, "Write this pre-tokenizer's name instead of the one recognised.", "--pre-tokenizer")
    ] = ""
    name: Annotated[str, plain(TYPES, "Name of the model in the file.", "--model-name")] = ""
    trust_remote_code: Annotated[
        bool,
        plain(TRUST, "Let Python code that lies in the folder run. It can do anything.", "--trust-remote-code"),
    ] = False
    allow_pickle: Annotated[
        bool, plain(TRUST, "Read pytorch_model.bin. Only for folders you trust.", "--allow-pickle")
    ] = False
    json: Json = False


@dataclass(frozen=True)
class QuantizeFlags:
    """A model, the file to make and its types, in llama-quantize's words."""

    model: Annotated[str, argument("MODEL", "GGUF file (any part of a split one), alias, or Hugging Face folder.")]
    output: Output
    type_name: Annotated[
        str, argument("TYPE", "Such as Q4_K_M; may be left out with --target-bpw and --target-size.")
    ] = ""
    imatrix: Annotated[Path | None, plain(TYPES, "Importance matrix to use.", "--imatrix", metavar="FILE")] = None
    tensor_type: Annotated[
        list[str] | None, plain(TYPES, "Type of the tensors that match.", "--tensor-type", metavar="REGEX=TYPE")
    ] = None
    output_tensor_type: Annotated[str | None, plain(TYPES, "Type of output.weight.", "--output-tensor-type")] = None
    token_embedding_type: Annotated[
        str | None, plain(TYPES, "Type of the token embedding.", "--token-embedding-type")
    ] = None
    pure: Annotated[bool, plain(TYPES, "One type for all tensors, no mix.", "--pure")] = False
    target_bpw: Annotated[
        float | None, plain(TYPES, "Choose types per tensor for this many bits per weight.", "--target-bpw")
    ] = None
    target_size: Annotated[
        str | None, plain(TYPES, "Choose types per tensor for this size, such as 4GiB.", "--target-size")
    ] = None
    strict: Annotated[bool, plain(TYPES, "Fail when a tensor cannot have the type asked for.", "--strict")] = False
    allow_requantize: Annotated[
        bool, plain(TYPES, "Accept a model that is already quantized; quality drops.", "--allow-requantize")
    ] = False
    keep_split: Annotated[bool, plain(WORK, "Write as many parts as the input has.", "--keep-split")] = False
    threads: JobThreads = 0
    dry_run: DryRun = False
    json: Json = False


Chunk = Annotated[int, plain(TEXT, "Tokens read at once.", "--chunk", least=32, most=1 << 20)]
Chunks = Annotated[int, plain(TEXT, "Chunks of the text to use; 0: all of it.", "--chunks", least=0)]


@dataclass(frozen=True)
class ReportFlags:
    """Whether and on which text the loss of a quantization is measured."""

    report: Annotated[bool, plain(TEXT, "Measure what was lost; needs --text.", "--report")] = False
    text: Annotated[
        Path | None, plain(TEXT, "Text for --report, --target-bpw and --target-size.", "--text", metavar="FILE")
    ] = None
    plot: Annotated[Path | None, plain(TEXT, "Write the report's picture (PNG) here.", "--plot", metavar="FILE")] = None
    chunk: Chunk = 512
    chunks: Chunks = 0


@dataclass(frozen=True)
class ImatrixFlags:
    """A model, a text and the importance matrix to make of them, in llama-imatrix's words."""

    model: Annotated[str, argument("MODEL", "GGUF file of the unquantized model, or an alias.")]
    text: Annotated[Path, plain(TEXT, "Text to read.", "-f", "--file", metavar="FILE")]
    output: Annotated[Path, plain(WORK, "Importance matrix to write (GGUF).", "-o", "--output", metavar="FILE")]
    chunk: Chunk = 512
    chunks: Chunks = 0
    json: Json = False


@dataclass(frozen=True)
class ValidateFlags:
    """The files that `validate` checks, and how far."""

    files: Annotated[list[str], argument("FILE...", "GGUF files, or aliases that were fetched.")]
    json: Json = False
    check_tensors: Annotated[
        bool, plain(WORK, "Read all weights and look for NaN and Inf.", "--check-tensors/--no-check-tensors")
    ] = True
