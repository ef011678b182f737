"""Described machines and models for tests of the planner, and a count of bytes that follows the engine's rules.

No file and no engine: shapes come from headers made here, rates from a few numbers a machine. `counted` places every
tensor by its name, as the engine's loader does, so it checks the patterns that a plan gives.
"""

from __future__ import annotations

import re
from pathlib import Path

from hybridgen_gguf.machine.hardware import Cpu, Device, Hardware, KernelRate, Link, Memory, ThreadRate
from hybridgen_gguf.model_file.header import Header, TensorInfo, Value
from hybridgen_gguf.model_file.shape import ModelShape, shape_of
from hybridgen_gguf.model_file.split import ModelFile
from hybridgen_gguf.model_file.types import row_bytes
from hybridgen_gguf.plan import Draft, MemoryUse

GIB = 1 << 30
TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16")


def dense(layers: int, width: int, ffn: int, heads: int, kv_heads: int, vocab: int, kind: str = "Q4_K") -> ModelShape:
    """A llama."""
    return _shape(layers, width, ffn, heads, kv_heads, vocab, kind, experts=0, used=0)


def moe(
    layers: int,
    width: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    experts: int,
    used: int,
    kind: str = "Q4_K",
) -> ModelShape:
    """A model whose FFNs are experts of `ffn` each."""
    return _shape(layers, width, ffn, heads, kv_heads, vocab, kind, experts, used)


def _shape(
    layers: int, width: int, ffn: int, heads: int, kv_heads: int, vocab: int, kind: str, experts: int, used: int
) -> ModelShape:
    head = 128 if width // heads < 64 else width // heads
    tensors: list[TensorInfo] = []

    def add(name: str, *dims: int, of: str = kind) -> None:
        size = row_bytes(of, dims[0])
        for dim in dims[1:]:
            size *= dim
        tensors.append(TensorInfo(name, dims, of, 0, size))

    add("token_embd.weight", width, vocab)
    add("output.weight", width, vocab, of="Q6_K" if kind == "Q4_K" else kind)
    add("output_norm.weight", width, of="F32")
    for layer in range(layers):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", width, of="F32")
        add(at + "ffn_norm.weight", width, of="F32")
        add(at + "attn_q.weight", width, heads * head)
        add(at + "attn_k.weight", width, kv_heads * head)
        add(at + "attn_v.weight", width, kv_heads * head)
        add(at + "attn_output.weight", heads * head, width)
        if experts:
            add(at + "ffn_gate_inp.weight", width, experts, of="F32")
            add(at + "ffn_gate_exps.weight", width, ffn, experts)
            add(at + "ffn_up_exps.weight", width, ffn, experts)
            add(at + "ffn_down_exps.weight", ffn, width, experts)
        else:
            add(at + "ffn_gate.weight", width, ffn)
            add(at + "ffn_up.weight", width, ffn)
            add(at + "ffn_down.weight", ffn, width, of="Q6_K" if kind == "Q4_K" and layer % 2 else kind)
    keys: dict[str, Value] = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": width,
        "llama.feed_forward_length": ffn, "llama.context_length": 131072, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads, "llama.attention.key_length": head,
        "llama.attention.value_length": head, "llama.vocab_size": vocab,
    }  # fmt: skip
    if experts:
        keys |= {"llama.expert_count": experts, "llama.expert_used_count": used}
    header = Header(Path("described.gguf"), 3, keys, tuple(tensors), 0, 0, 32)
    return shape_of(ModelFile((Path("described.gguf"),), (header,)))


def gpu(name: str, memory: float, gbps: float, tflops: float) -> Device:
    """A card with `memory` GiB free whose kernels reach `gbps` and `tflops`."""
    kernels = [KernelRate("node", "", 0, 0.0, 0.0005)]
    for kind in TYPES:
        kernels += [KernelRate(f"matvec{s}", kind, 0, 0.75 * gbps, 0.0) for s in ("", "-short")]
        kernels += [KernelRate(f"matmul{s}", kind, 0, 0.0, 1000 * tflops) for s in ("", "-short")]
    for kind in ("F16", "Q8_0", "Q4_0"):
        kernels += [KernelRate(f"attention-{n}", kind, 0, 0.6 * gbps, 2.4 * gbps) for n in (1024, 8192)]
        kernels.append(KernelRate("attention-prompt", kind, 0, 0.0, 400 * tflops))
    size = round(memory * GIB)
    return Device(name, "gpu", name, None, size, size, read_gbps=gbps, launch_s=1e-5, kernels=tuple(kernels))


def machine(
    cores: int, gbps: float, memory: float, *devices: Device, link: float = 12.0, split: float = 8e-5
) -> Hardware:
    """A CPU of `cores` cores that read `gbps` together, with `memory` GiB free. `link`: GB/s; `split`: seconds."""
    kernels, read = [], []
    for threads in sorted({1, cores // 2, cores}):
        rate = min(gbps, threads * gbps / cores * 1.5)
        read.append(ThreadRate(threads, rate))
        kernels.append(KernelRate("node", "", threads, 0.0, 0.002 if threads == 1 else 0.0005))
        for kind in TYPES:
            kernels += [KernelRate(f"matvec{s}", kind, threads, 0.85 * rate, 0.0) for s in ("", "-short")]
            kernels += [KernelRate(f"matmul{s}", kind, threads, 0.0, 60.0 * threads) for s in ("", "-short")]
        for kind in ("F16", "Q8_0", "Q4_0"):
            kernels += [KernelRate(f"attention-{n}", kind, threads, 0.7 * rate, 2.8 * rate) for n in (1024, 8192)]
            kernels.append(KernelRate("attention-prompt", kind, threads, 0.0, 40.0 * threads))
    cpu = Cpu("described", "x86_64", cores, cores, cores, f"{cores} physical cores", kernels=tuple(kernels))
    links = tuple(Link(d.name, link, link, link / 2, link / 2, split) for d in devices)
    return Hardware(cpu, Memory(round(memory * GIB), round(memory * GIB), read=tuple(read)), devices, links)


def counted(shape: ModelShape, plan: Draft) -> tuple[MemoryUse, ...]:
    """Bytes by device: tensors by their names and the plan's patterns, KV by layer, scratch by a rule of thumb."""
    names = list(plan.placement.devices or ()) or ["GPU0"]
    places, context = _places(shape, plan, names), plan.context
    kv = shape.kv_bytes_per_layer(context.n_ctx, context.type_k, context.type_v, context.n_ubatch)
    weights, cache = dict.fromkeys(["CPU", *names], 0), dict.fromkeys(["CPU", *names], 0)
    output_on = "CPU"
    for tensor in shape.file.tensors:
        block = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else None
        place = places[block] if block is not None else "CPU" if tensor.name == "token_embd.weight" else places[-1]
        override = next((to for pattern, to in plan.placement.patterns if re.search(pattern, tensor.name)), None)
        weights[override or place] += tensor.bytes
        output_on = (override or place) if tensor.name == "output.weight" else output_on
    tiers = context.tiers
    for layer, size in enumerate(kv):
        on_device = places[layer] != "CPU" and plan.placement.kv_offload
        part = size if tiers is None else size * (tiers.cells + 1) // context.n_ctx
        cache[places[layer] if on_device else "CPU"] += part if on_device else size
        cache["CPU"] += size - part if on_device else 0
    scratch = {name: 4 * context.n_ubatch * (3 * shape.n_ff + 4 * shape.n_embd) for name in weights if name in places}
    if tiers is not None:  # for prompts the rows of a layer are joined on the device
        scratch = {name: size + 2 * max(kv) for name, size in scratch.items()}
    scratch["CPU"] = scratch.get("CPU", 0) + (8 << 20)
    scratch[output_on] = scratch.get(output_on, 0) + 4 * shape.n_vocab  # of one token, as the loader asks
    return tuple(MemoryUse(n, weights[n], cache[n], scratch.get(n, 0)) for n in weights if n == "CPU" or n in places)


def _places(shape: ModelShape, plan: Draft, names: list[str]) -> list[str]:
    """Where the engine puts each layer, the output last (llama-model.cpp: get_layer_buft_list)."""
    n, layers = shape.n_layers + 1, plan.model.n_gpu_layers
    first, shares = n - layers, plan.placement.tensor_split or (1.0,)
    ends = [sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
    places = []
    for layer in range(n):
        if layer < first:
            places.append("CPU")
        else:
            places.append(names[next(i for i, end in enumerate(ends) if (layer - first) / layers < end)])
    return places
