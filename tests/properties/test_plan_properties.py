"""Plans of described machines, KV in two memories included: more memory never predicts slower, no budget is broken."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from planned import counted, dense, gpu, machine, moe

from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.model_file.shape import ModelShape
from hybridgen_gguf.plan import Limits, Plan, make_plan

SHAPES = {
    "dense": dense(16, 2048, 5632, 16, 4, 32000),
    "much KV": dense(32, 512, 1024, 8, 8, 8000),
    "experts": moe(12, 1024, 512, 8, 4, 32000, 32, 4),
}
MIB = 1 << 20


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """A CPU and a card of 2 to 20 times its memory's speed, close or far.

    Whatever fits goes to a card: where that is not faster than the CPU, more memory can be predicted slower.
    """
    gbps = draw(st.sampled_from([20, 45, 90]))
    card = gpu("GPU0", 30, gbps * draw(st.sampled_from([2, 8, 20])), draw(st.sampled_from([5, 40])))
    split = draw(st.sampled_from([1e-6, 4e-5, 2e-4]))
    return machine(8, gbps, 60, card, link=draw(st.sampled_from([6.0, 24.0])), split=split)


def planned(hardware: Hardware, shape: ModelShape, vram: int, n_ctx: int, share: float, goal: str) -> Plan:
    limits = Limits(n_ctx=n_ctx, depth=int(n_ctx * share), vram=vram, goal=goal, flash_attention="on")
    return make_plan(hardware, shape, limits, lambda plan: counted(shape, plan))


def seconds(plan: Plan, goal: str) -> float:
    assert plan.predicted is not None
    one, many = 1 / plan.predicted.decode_tps, plan.predicted.depth / plan.predicted.prompt_tps
    return one if goal == "decode" else 256 * one + many


@given(
    machines(),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from([4096, 32768]),
    st.sampled_from([0.25, 0.9]),
    st.sampled_from(["decode", "mixed"]),
    st.lists(st.integers(50, 3000), min_size=4, max_size=4, unique=True),
)
@settings(max_examples=25, deadline=None)
def test_more_memory_is_not_predicted_slower(
    hardware: Hardware, name: str, n_ctx: int, share: float, goal: str, budgets: list[int]
) -> None:
    least = float("inf")
    for mib in sorted(budgets):
        plan = planned(hardware, SHAPES[name], mib * MIB, n_ctx, share, goal)
        assert plan.bytes_device <= mib * MIB
        now = seconds(plan, goal)
        assert now <= least * 1.01, (mib, plan.reasons)
        least = min(least, now)


def quick_attention() -> Hardware:
    """A machine whose CPU attends as fast as it multiplies weights."""
    hardware = machine(8, 45, 60, gpu("GPU0", 30, 400, 40), split=2e-5)
    kernels = tuple(
        replace(rate, gflops=1.4 * rate.gflops) if rate.operation.startswith("attention") else rate
        for rate in hardware.cpu.kernels
    )
    return replace(hardware, cpu=replace(hardware.cpu, kernels=kernels))


def test_the_cases_hold_every_kind_of_plan() -> None:
    """Parts on the CPU with KV in two memories, in one, and everything on the device."""
    kinds = set()
    for name, mib in (("much KV", 1000), ("much KV", 1600), ("much KV", 9000), ("experts", 300)):
        plan = planned(quick_attention(), SHAPES[name], mib * MIB, 32768, 0.9, "decode")
        whole = plan.model.n_gpu_layers == plan.n_layers + 1 and not plan.placement.patterns
        kinds.add("two" if plan.placement.tiers is not None else "all" if whole else "one")
    assert kinds == {"two", "one", "all"}


def test_a_context_that_fits_has_one_memory() -> None:
    hardware = machine(8, 45, 60, gpu("GPU0", 30, 60, 1), split=1e-6)  # a card hardly faster than the CPU
    for shape in SHAPES.values():
        plan = planned(hardware, shape, 20 << 30, 32768, 0.9, "decode")
        assert plan.placement.tiers is None and plan.model.n_gpu_layers == shape.n_layers + 1


def test_tiers_are_left_where_they_cannot_be() -> None:
    hardware, shape = quick_attention(), SHAPES["much KV"]
    assert planned(hardware, shape, 1600 * MIB, 32768, 0.9, "decode").placement.tiers is not None
    for limits in (Limits(flash_attention="off"), Limits(stock_only=True), Limits(kv_vram=1 << 40)):
        wanted = replace(limits, n_ctx=32768, depth=30000, vram=1600 * MIB, goal="decode")
        assert make_plan(hardware, shape, wanted, lambda plan: counted(shape, plan)).placement.tiers is None


def test_host_memory_that_tiers_need_must_be_there() -> None:
    """With less of it a plan that fits wins over one that would cut the context."""
    hardware, shape = quick_attention(), SHAPES["much KV"]
    wanted = Limits(n_ctx=32768, depth=30000, vram=1600 * MIB, goal="decode")
    parted = make_plan(hardware, shape, wanted, lambda plan: counted(shape, plan))
    assert parted.placement.tiers is not None
    tight = replace(wanted, ram=parted.bytes_host - MIB)
    plan = make_plan(hardware, shape, tight, lambda plan: counted(shape, plan))
    assert plan.bytes_host <= parted.bytes_host - MIB and plan.context.n_ctx == 32768
