"""The planned border between CPU and device for host cells: from measured rates, with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import counted, dense, gpu, machine

from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.plan import Limits, Plan, make_plan
from hybridgen_gguf.settings import Tiers

SHAPE = dense(16, 2048, 5632, 16, 4, 32000)
CARD = gpu("GPU0", 7.2, 250, 20)
TIERED = Limits(n_ctx=8192, n_gpu_layers=-1, kv_vram=64 << 20)


def planned(hardware: Hardware, limits: Limits = TIERED) -> Plan:
    return make_plan(hardware, SHAPE, limits, lambda plan: counted(SHAPE, plan))


def tiers_of(plan: Plan) -> Tiers:
    assert plan.placement.tiers is not None
    return plan.placement.tiers


def reason(plan: Plan) -> str:
    return next((f"{r.value}: {r.why}" for r in plan.reasons if r.name == "attention to host cells"), "")


def test_a_fast_cpu_attends_itself() -> None:
    plan = planned(machine(8, 45, 14, CARD, link=12))
    assert plan.placement.tiers is not None and (plan.placement.tiers.cpu_tokens or 0) >= 1
    assert "on the CPU up to" in reason(plan) and "12.0 GB/s" in reason(plan)


def test_a_cpu_slower_than_the_link_is_never_used() -> None:
    plan = planned(machine(2, 10, 14, CARD, link=50))
    assert tiers_of(plan).cpu_tokens == 0 and "after a copy" in reason(plan)


@pytest.mark.parametrize("limits", [replace(TIERED, kv_vram=None), replace(TIERED, kv_cpu_tokens=3)])
def test_what_is_given_or_not_needed_stays(limits: Limits) -> None:
    plan = planned(machine(8, 45, 14, CARD), limits)
    asked = None if plan.placement.tiers is None else plan.placement.tiers.cpu_tokens
    assert asked == limits.kv_cpu_tokens and reason(plan) == ""


def test_nothing_is_chosen_without_a_measured_link() -> None:
    hardware = replace(machine(8, 45, 14, CARD), links=())
    assert tiers_of(planned(hardware)).cpu_tokens is None


def test_the_link_helps_a_cpu_that_leaves_memory_idle() -> None:
    plan = planned(machine(8, 45, 14, CARD, link=12))  # its attention reaches 0.7 of the memory's rate
    assert tiers_of(plan).share == 0.25
    assert any(r.name == "host cells to the device" and "25%" in r.value for r in plan.reasons)
    other = planned(machine(8, 45, 14, CARD, link=12), replace(TIERED, kv_ram_type="q8_0"))
    assert tiers_of(other).share is None, "rows of another type would have to be converted"
