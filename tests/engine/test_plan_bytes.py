"""Bytes that a plan foretells against those that the engine then allocates, on the CPU and on an RPC device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tinygguf import build

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.loader import open_model, prepare
from hybridgen_gguf.plan import Limits
from hybridgen_gguf.settings import Placement

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that budgets part it: 8 layers, 27 MB of weights and 32 MiB of KV."""
    path = tmp_path_factory.mktemp("plan") / "model.gguf"
    return build(path, embd=512, ff=1024, layers=8, ctx=8192, heads=8, kv=4, wtype="f16", tied=False)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("vram", [None, 1, 12, 25, 40, 200])
def test_foretold_and_allocated(engine: Library, rpc_device: str, model: Path, vram: int | None, kind: str) -> None:
    read = Placement(use_mmap=False)
    limits = Limits(n_ctx=4096, n_ubatch=128, type_k=kind, type_v=kind, vram=vram and vram * MIB, placement=read)
    prepared = prepare(model, limits, rpc=() if vram is None else (rpc_device,))
    with open_model(prepared) as opened:
        assert opened.context.decode([5, 6, 7])
        opened.context.synchronize()
        allocated = {use.device: use for use in opened.memory() if use.total}
    foretold = {use.device: use for use in prepared.plan.memory if use.total}
    assert foretold == allocated
    if vram is not None:
        assert all(use.total <= vram * MIB for name, use in allocated.items() if name != "CPU")


def test_budgets_part_the_model(engine: Library, rpc_device: str, model: Path) -> None:
    """The cases above are not all the same plan."""
    layers = [
        prepare(model, Limits(n_ctx=4096, n_ubatch=128, vram=mib * MIB), rpc=(rpc_device,)).plan.model.n_gpu_layers
        for mib in (1, 25, 200)
    ]
    assert layers[0] == 0 and 0 < layers[1] < 9 and layers[2] == 9


@pytest.mark.parametrize(("kind", "share"), [(None, None), ("q8_0", None), (None, 0.5)])
def test_two_memories(
    engine: Library,
    rpc_device: str,
    model: Path,
    kind: str | None,
    share: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for host rows that are copied ahead is foretold as well."""
    limits = Limits(n_ctx=4096, n_ubatch=128, n_gpu_layers=-1, flash_attention="on", kv_vram=8 * MIB, kv_ram_type=kind)
    limits = replace(limits, kv_share=share)
    scratch = {}
    for prefetch in ("off", "on"):
        monkeypatch.setenv("HGGUF_KV_PREFETCH", prefetch)  # for the child that counts
        engine.set_switch("kv-prefetch", prefetch)
        try:
            prepared = prepare(model, limits, rpc=(rpc_device,))
            with open_model(prepared) as opened:
                assert opened.context.tier_counters() is not None
                assert opened.context.decode([5, 6, 7])
                opened.context.synchronize()
                allocated = {use.device: use for use in opened.memory() if use.total}
        finally:
            engine.set_switch("kv-prefetch", "on")
        assert {use.device: use for use in prepared.plan.memory if use.total} == allocated
        scratch[prefetch] = sum(use.compute for name, use in allocated.items() if name != "CPU")
    assert scratch["on"] > scratch["off"]
