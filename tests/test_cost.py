"""Predicted seconds: what they must grow with, and how rates are looked up between those measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import dense, gpu, machine

from hybridgen_gguf.machine.hardware import Hardware, KernelRate
from hybridgen_gguf.machine.rates import CPU, Product, Rates
from hybridgen_gguf.plan import Limits, MemoryUse, make_plan, predict
from hybridgen_gguf.plan.cost import CostModel, Use, work_of
from hybridgen_gguf.settings import ContextSettings

SHAPE = dense(8, 1024, 2816, 16, 4, 32000)
CARD = machine(8, 60, 28, gpu("GPU0", 8, 400, 30))
USE = Use(1024, ContextSettings(1 << 20, threads=8, threads_batch=8))


def with_threads(threads: int) -> Use:
    return replace(USE, context=replace(USE.context, threads=threads))


def seconds(hardware: Hardware, use: Use, place: str = CPU, prefill: bool = False) -> float:
    model = CostModel(Rates(hardware), work_of(SHAPE), use)
    costs = model.prefill(place) if prefill else model.decode(place)
    return sum(cost.mixer + cost.cache + cost.heavy for cost in costs)


@pytest.mark.parametrize("place", [CPU, "GPU0"])
@pytest.mark.parametrize("prefill", [True, False])
def test_never_falls_with_depth(place: str, prefill: bool) -> None:
    depths = (1, 100, 256, 1000, 1024, 1025, 4096, 8192, 10000, 100000)
    found = [seconds(CARD, replace(USE, depth=depth), place, prefill) for depth in depths[1:]]
    assert found == sorted(found) or prefill  # a longer prompt shares the output's cost among more tokens
    assert all(value > 0 for value in found)


def test_a_rate_that_falls_with_depth_never_makes_time_fall() -> None:
    slow = replace(CARD.cpu, kernels=tuple(
        replace(rate, gflops=rate.gflops / 20) if rate.operation == "attention-8192" else rate
        for rate in CARD.cpu.kernels
    ))  # fmt: skip
    found = [seconds(replace(CARD, cpu=slow), replace(USE, depth=depth)) for depth in (1000, 2000, 8000, 30000, 120000)]
    assert found == sorted(found)


def test_a_device_is_faster_and_more_threads_help() -> None:
    assert seconds(CARD, USE, "GPU0") < seconds(CARD, USE)
    assert seconds(CARD, USE) < seconds(CARD, with_threads(4)) < seconds(CARD, with_threads(1))


def test_between_thread_counts() -> None:
    rates, product = Rates(CARD), Product("Q4_K", 4096, 4096)
    one, two, eight = (rates.matvec(CPU, product, threads) for threads in (1, 2, 8))
    assert eight < two < one


def test_an_unknown_type_takes_the_nearest() -> None:
    rates = Rates(CARD)
    q5, q4, q8 = (rates.matvec(CPU, Product(kind, 4096, 4096), 8) for kind in ("Q5_K", "Q4_K", "Q8_0"))
    assert q4 < q5 < q8


def test_share_of_experts() -> None:
    rates = Rates(CARD)
    every, few = (rates.matvec(CPU, Product("Q4_K", 65536, 1024, share), 8) for share in (1.0, 0.0625))
    assert few == pytest.approx(every / 16)


def test_nominal_rates_are_positive_and_predict_nothing() -> None:
    bare = replace(CARD, cpu=replace(CARD.cpu, kernels=()), memory=replace(CARD.memory, read=()), links=(),
                   devices=(replace(CARD.devices[0], kernels=(), read_gbps=None),))  # fmt: skip
    assert 0 < seconds(bare, USE, "GPU0") < seconds(bare, USE)
    plan = make_plan(machine(8, 60, 28), SHAPE, Limits(n_ctx=1024), lambda _: (MemoryUse("CPU", 0, 0, 0),))
    assert predict(Rates(bare), work_of(SHAPE), plan, 512) is None
    assert predict(Rates(CARD), work_of(SHAPE), plan, 512) is not None


def test_a_device_may_be_faster_with_more_cells() -> None:
    """A GPU's rate grows with the cells up to the most that were measured; the time still never falls."""
    quick = tuple(
        replace(rate, gflops=rate.gflops * 2.4) if rate.operation == "attention-8192" else rate
        for rate in CARD.devices[0].kernels
    )
    card = replace(CARD, devices=(replace(CARD.devices[0], kernels=quick, read_gbps=4000.0),))
    layer, types = next(layer.kv for layer in work_of(SHAPE).layers if layer.kv), USE.types
    found = [
        Rates(card).attention("GPU0", layer, types, cells, 0, prefill=False) for cells in (1024, 2048, 8192, 32768)
    ]
    same = [Rates(CARD).attention("GPU0", layer, types, cells, 0, prefill=False) for cells in (1024, 2048, 8192, 32768)]
    assert found == sorted(found) and found[0] == same[0]
    assert found[2] == pytest.approx(same[2] / 2.4) and found[3] == pytest.approx(4 * found[2])


@pytest.mark.parametrize("place", [CPU, "GPU0"])
@pytest.mark.parametrize("growing", [False, True])
def test_heads_between_the_measured_sizes(place: str, growing: bool) -> None:
    """A head's seconds lie on a line through the two sizes that were measured, also where more cells are faster."""

    def with_short(kernels: tuple[KernelRate, ...]) -> tuple[KernelRate, ...]:
        few = [rate for rate in kernels if rate.operation == "attention-1024"]
        many = [replace(rate, operation="attention-8192", gflops=(2.4 if growing else 1) * rate.gflops) for rate in few]
        short = [replace(rate, operation="attention-1024-short", gflops=0.8 * rate.gflops) for rate in few]
        return *(rate for rate in kernels if rate.operation != "attention-8192"), *many, *short

    cpu = replace(CARD.cpu, kernels=with_short(CARD.cpu.kernels))
    device = replace(CARD.devices[0], kernels=with_short(CARD.devices[0].kernels), read_gbps=4000.0)
    rates = Rates(replace(CARD, cpu=cpu, devices=(device,), memory=replace(CARD.memory, read=())))
    plain = Rates(replace(CARD, devices=(replace(CARD.devices[0], read_gbps=4000.0),)))
    layer = next(layer.kv for layer in work_of(SHAPE).layers if layer.kv)
    threads = 8 if place == CPU else 0

    def took(size: int, cells: int, of: Rates = rates) -> float:
        return of.attention(place, replace(layer, head_k=size, head_v=size), USE.types, cells, threads, prefill=False)

    assert took(128, 1024) == pytest.approx(took(128, 1024, plain))
    faster = 2.4 if growing and place != CPU else 1
    assert took(128, 8192) == pytest.approx(took(128, 8192, plain) / faster)
    for cells in (1024, 8192):
        assert took(64, cells) == pytest.approx(took(128, cells) / 2 / 0.8)
        assert took(96, cells) == pytest.approx((took(64, cells) + took(128, cells)) / 2)
        assert took(256, cells) == pytest.approx(took(128, cells) + 2 * (took(128, cells) - took(64, cells)))
