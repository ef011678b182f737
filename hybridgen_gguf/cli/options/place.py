"""Flags that say what lies and runs where, under llama.cpp's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .change import ChangeFlags
from .spread import flag, plain

PLACE = "Placement and memory"

Rpc = Annotated[
    str | None, flag(PLACE, "RPC servers, separated by commas.", "--rpc", llama="RPC", metavar="HOST:PORT,...")
]


@dataclass(frozen=True)
class PlaceFlags(ChangeFlags):
    """What the user allows or fixes; what is left unset, the planner chooses."""

    ctx_size: Annotated[int | None, flag(PLACE, "Context in tokens.", "-c", "--ctx-size", llama="CTX_SIZE")] = None
    n_gpu_layers: Annotated[
        str | None,
        flag(
            PLACE,
            "Layers on the GPU; -1: all.",
            "-ngl",
            "--n-gpu-layers",
            "--gpu-layers",
            llama="N_GPU_LAYERS",
            metavar="N|auto|all",
        ),
    ] = None
    vram: Annotated[
        str | None,
        flag(PLACE, "Bytes that may be taken of each GPU, such as 6GiB; 0: the CPU alone.", "--vram", metavar="SIZE"),
    ] = None
    ram: Annotated[str | None, flag(PLACE, "Bytes of host memory that may be taken.", "--ram", metavar="SIZE")] = None
    threads: Annotated[
        int | None, flag(PLACE, "Threads for decode; -1: chosen.", "-t", "--threads", llama="THREADS")
    ] = None
    threads_batch: Annotated[
        int | None, flag(PLACE, "Threads for prefill (prompts); -1: chosen.", "-tb", "--threads-batch")
    ] = None
    adapt_threads: Annotated[
        bool,
        flag(
            PLACE,
            "Use fewer threads while other programs are busy. Rounding, and so the text, may differ between runs.",
            "--adapt-threads",
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        flag(PLACE, "Logical batch: tokens that one call to the engine takes.", "-b", "--batch-size", llama="BATCH"),
    ] = None
    ubatch_size: Annotated[
        int | None, flag(PLACE, "Micro-batch: tokens computed at once.", "-ub", "--ubatch-size", llama="UBATCH")
    ] = None
    cache_type_k: Annotated[
        str, flag(PLACE, "Type of the K cache.", "-ctk", "--cache-type-k", llama="CACHE_TYPE_K")
    ] = "f16"
    cache_type_v: Annotated[
        str, flag(PLACE, "Type of the V cache.", "-ctv", "--cache-type-v", llama="CACHE_TYPE_V")
    ] = "f16"
    flash_attn: Annotated[
        str, flag(PLACE, "Flash attention.", "-fa", "--flash-attn", llama="FLASH_ATTN", metavar="on|off|auto")
    ] = "auto"
    no_kv_offload: Annotated[bool, flag(PLACE, "Keep the KV cache in host memory.", "-nkvo", "--no-kv-offload")] = False
    kv_vram: Annotated[
        str | None,
        flag(
            PLACE,
            "KV cache on the GPU; the rest lies in RAM, where the CPU attends to it. [default: what is fastest]",
            "--kv-vram",
            metavar="SIZE",
        ),
    ] = None
    kv_ram_type: Annotated[
        str | None,
        flag(PLACE, "Type of the part of the KV cache that lies in RAM.", "--kv-ram-type", metavar="f16|q8_0|q4_0"),
    ] = None
    kv_policy: Annotated[
        str,
        flag(
            PLACE,
            "Which tokens' KV stays on the GPU: the first ones (fill), or the most recent ones.",
            "--kv-policy",
            metavar="fill|recent",
        ),
    ] = "fill"
    adapt_kv: Annotated[
        bool,
        flag(
            PLACE,
            "Choose while running whether CPU or GPU attends to KV in RAM. Rounding may vary between runs.",
            "--adapt-kv",
        ),
    ] = False
    override_tensor: Annotated[
        list[str] | None,
        flag(
            PLACE,
            "Buffer type (such as CPU or CUDA0) for tensors whose name matches.",
            "-ot",
            "--override-tensor",
            llama="OVERRIDE_TENSOR",
            metavar="PATTERN=TYPE,...",
        ),
    ] = None
    n_cpu_moe: Annotated[
        int | None,
        flag(PLACE, "Keep the experts of the first N layers on the CPU.", "-ncmoe", "--n-cpu-moe", llama="N_CPU_MOE"),
    ] = None
    device: Annotated[
        str | None, flag(PLACE, "Devices to use, separated by commas.", "-dev", "--device", llama="DEVICE")
    ] = None
    split_mode: Annotated[
        str,
        flag(
            PLACE,
            "How several GPUs share the model.",
            "-sm",
            "--split-mode",
            llama="SPLIT_MODE",
            metavar="none|layer|row",
        ),
    ] = "layer"
    tensor_split: Annotated[
        str | None, flag(PLACE, "Share of each GPU, such as 3,1.", "-ts", "--tensor-split", llama="TENSOR_SPLIT")
    ] = None
    main_gpu: Annotated[int, flag(PLACE, "The GPU for -sm none.", "-mg", "--main-gpu", llama="MAIN_GPU")] = 0
    mlock: Annotated[bool, flag(PLACE, "Lock the weights in memory.", "--mlock")] = False
    no_mmap: Annotated[bool, flag(PLACE, "Read the weights instead of mapping the file.", "--no-mmap")] = False
    numa: Annotated[
        str | None,
        flag(PLACE, "NUMA strategy.", "--numa", llama="NUMA", metavar="distribute|isolate|numactl"),
    ] = None
    rpc: Rpc = None
    plan: Annotated[
        str | None, plain(PLACE, "Use the plan in this file (made by `hgguf plan --json`).", "--plan", metavar="FILE")
    ] = None
    goal: Annotated[
        str,
        flag(
            PLACE, "What the plan is made fast for: decode, prompts, or both.", "--goal", metavar="decode|prompt|mixed"
        ),
    ] = "mixed"
    depth: Annotated[
        int | None,
        flag(
            PLACE,
            "Tokens that the plan expects in the context. [default: what prompt and answer need, or half of it]",
            "--depth",
        ),
    ] = None
    no_tuned: Annotated[bool, flag(PLACE, "Ignore what `hgguf tune` found.", "--no-tuned")] = False
    strict: Annotated[
        bool, flag(PLACE, "Settings without an effect, such as -ot that matches no tensor, are an error.", "--strict")
    ] = False
