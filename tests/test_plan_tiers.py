"""--kv-vram and --kv-ram-type in a plan: whole steps of cells, one memory where all fits, and what excludes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import GIB, counted, dense, gpu, machine, moe

from hybridgen_gguf.errors import EngineError, UsageError
from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.plan import Draft, Limits, MemoryUse, Plan, make_plan
from hybridgen_gguf.settings import CELL_STEP, Placement

SHAPE = dense(16, 2048, 5632, 16, 4, 32000)
CARD = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20))
ALONE = machine(8, 45, 14)
EXPERTS = moe(12, 1024, 512, 8, 4, 32000, 32, 4)
TWO = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20), gpu("GPU1", 3.0, 120, 8))
CONTEXT = 32768


def planned(limits: Limits, hardware: Hardware = CARD) -> Plan:
    def count(plan: Draft) -> tuple[MemoryUse, ...]:
        return counted(SHAPE, plan) if hardware.devices else counted(SHAPE, plan)[:1]

    return make_plan(hardware, SHAPE, limits, count)


def why(plan: Plan) -> str:
    return next(f"{reason.value}: {reason.why}" for reason in plan.reasons if reason.name == "kv tiers")


@pytest.mark.parametrize("mib", [1, 10, 100, 300, 511])
def test_as_many_cells_as_fit(mib: int) -> None:
    plan = planned(Limits(n_ctx=CONTEXT, kv_vram=mib << 20, kv_ram_type="q8_0"))
    tiers = plan.placement.tiers
    assert tiers is not None
    cells = tiers.cells
    per_cell = SHAPE.kv_bytes(CONTEXT) // CONTEXT
    assert cells % CELL_STEP == 0
    assert cells * per_cell <= mib << 20 < (cells + CELL_STEP) * per_cell
    assert (tiers.type, plan.context.flash_attention) == ("q8_0", "on")
    assert f"{cells} cells on the device, {CONTEXT - cells} in host memory" in why(plan)


def test_what_fits_has_one_memory() -> None:
    plan = planned(Limits(n_ctx=CONTEXT, kv_vram=4 * GIB))
    assert plan.placement.tiers is None and "one memory" in why(plan)
    assert plan.kv == planned(Limits(n_ctx=CONTEXT)).kv


@pytest.mark.parametrize("asked", [{"kv_vram": GIB}, {"kv_ram_type": "q8_0"}])
def test_what_excludes_two_tiers(asked: dict[str, object]) -> None:
    flag = "--kv-vram" if "kv_vram" in asked else "--kv-ram-type"
    limits = replace(Limits(n_ctx=4096), **asked)  # type: ignore[arg-type]  # fields of Limits
    for changes, other in (
        ({"flash_attention": "off"}, "-fa off"),
        ({"placement": Placement(kv_offload=False)}, "-nkvo"),
    ):
        with pytest.raises(UsageError, match=f"{flag} and {other} exclude each other"):
            planned(replace(limits, **changes))  # type: ignore[arg-type]
    for hardware, placement in ((ALONE, Placement()), (CARD, Placement(devices=()))):
        with pytest.raises(UsageError, match=f"{flag} was given, but there is no device"):
            planned(replace(limits, placement=placement), hardware)


def test_an_engine_that_cannot_part_the_cache_keeps_it_in_one_memory() -> None:
    """The planner asks for two tiers by itself where they seem faster, and takes no for an answer."""

    def count(plan: Draft) -> tuple[MemoryUse, ...]:
        if plan.placement.tiers is not None:
            raise EngineError("heads of 80 have no kernel for two tiers")
        return counted(SHAPE, plan)

    plan = make_plan(CARD, SHAPE, Limits(n_ctx=131072, vram=3 * GIB, goal="decode"), count)
    assert plan.placement.tiers is None
    told = [reason for reason in plan.reasons if reason.name == "kv tiers"]
    assert not told or "no kernel" in told[0].why


def test_a_type_alone_leaves_the_border_to_the_planner() -> None:
    plan = planned(Limits(n_ctx=CONTEXT, kv_ram_type="q8_0", vram=GIB))
    assert plan.placement.tiers is None or plan.placement.tiers.type == "q8_0"


def test_no_device_holds_a_cache_that_is_not_offloaded() -> None:
    plan = planned(Limits(n_ctx=CONTEXT, vram=GIB, placement=Placement(kv_offload=False)))
    assert plan.placement.tiers is None
    assert all(use.kv == 0 for use in plan.memory if use.device != "CPU")


def test_a_device_too_small_for_anything_is_left_out() -> None:
    """The engine takes scratch of a device that holds no layer, unless it is told to use none."""

    def count(plan: Draft) -> tuple[MemoryUse, ...]:
        host = counted(SHAPE, plan)[0]
        return (host,) if plan.placement.devices == () else (host, MemoryUse("GPU0", 0, 0, GIB))

    plan = make_plan(CARD, SHAPE, Limits(n_ctx=4096, vram=1 << 20), count)
    assert (plan.model.n_gpu_layers, plan.placement.devices) == (0, ())
    assert any(reason.name == "devices" and "scratch" in reason.why for reason in plan.reasons)


def test_a_part_of_a_layer_that_the_engine_finds_too_much_stays_on_the_host() -> None:
    """Part of a layer fills what is left of a budget; the engine has the last word."""
    limits = Limits(n_ctx=4096, vram=120 << 20, goal="decode")

    def in_part(plan: Draft) -> bool:
        return any(pattern.count("exps") == 1 for pattern, _ in plan.placement.patterns)

    def count(plan: Draft) -> tuple[MemoryUse, ...]:
        used = counted(EXPERTS, plan)
        return (used[0], *(replace(use, compute=GIB) for use in used[1:])) if in_part(plan) else used

    assert in_part(make_plan(TWO, EXPERTS, limits, lambda plan: counted(EXPERTS, plan)))
    plan = make_plan(TWO, EXPERTS, limits, count)
    assert not in_part(plan)
    assert all(use.total <= 120 << 20 for use in plan.memory if use.device != "CPU")
