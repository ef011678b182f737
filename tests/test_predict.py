"""Predictions describe the placement that the engine makes: of a user's patterns, proportions and devices too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned import counted, gpu, machine, moe

from hybridgen_gguf.cli.arguments import _overrides
from hybridgen_gguf.errors import DoesNotFit, UsageError
from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.machine.rates import Rates
from hybridgen_gguf.model_file.header import TensorInfo
from hybridgen_gguf.model_file.shape import ModelShape, shape_of
from hybridgen_gguf.model_file.split import ModelFile
from hybridgen_gguf.plan import Limits, MemoryUse, Plan, Predicted, make_plan, predict
from hybridgen_gguf.plan.cost import work_of
from hybridgen_gguf.settings import Placement

EXPERTS = moe(12, 1024, 512, 8, 4, 32000, 32, 4)
CARD = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20))
TWO = machine(8, 45, 14, gpu("GPU0", 6, 250, 20), gpu("GPU1", 3, 120, 8))


def fused(shape: ModelShape) -> ModelShape:
    """The same with gate and up of the experts in one tensor."""
    tensors = []
    for tensor in shape.file.tensors:
        if "ffn_gate_exps" in tensor.name:
            columns, rows, experts = tensor.shape
            name = tensor.name.replace("gate_exps", "gate_up_exps")
            tensors.append(TensorInfo(name, (columns, 2 * rows, experts), tensor.type, 0, 2 * tensor.bytes))
        elif "ffn_up_exps" not in tensor.name:
            tensors.append(tensor)
    header = replace(shape.file.headers[0], tensors=tuple(tensors))
    return shape_of(ModelFile(shape.file.paths, (header,)))


def planned(shape: ModelShape = EXPERTS, hardware: Hardware = CARD, **place: Any) -> Plan:
    limits = Limits(n_ctx=4096, n_gpu_layers=-1, goal="decode", placement=Placement(**place))
    return make_plan(hardware, shape, limits, lambda plan: counted(shape, plan))


def predicted(plan: Plan, hardware: Hardware = CARD, shape: ModelShape = EXPERTS) -> Predicted:
    found = predict(Rates(hardware), work_of(shape), plan, 1024)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [EXPERTS, fused(EXPERTS)], ids=["apart", "fused"])
@pytest.mark.parametrize("layers", [1, 5, 12])
def test_ncmoe_as_the_planner_would_place_it(shape: ModelShape, layers: int) -> None:
    """-ncmoe N says the same as the names of those layers' experts, fused ones too."""
    work = work_of(shape)
    names = tuple(name for layer in work.layers[:layers] for name in layer.heavy_names)
    by_pattern = planned(shape, overrides=_overrides((), layers))
    by_names = planned(shape).with_placement(Placement(on_host=names))
    assert (
        by_pattern.predicted
        and predict(Rates(CARD), work, by_names, by_pattern.predicted.depth) == by_pattern.predicted
    )
    every = planned(shape).predicted
    assert every is not None and by_pattern.predicted.decode_tps < every.decode_tps


def test_patterns_of_the_user_slow_down_what_they_take_away() -> None:
    speeds = [
        predicted(planned(overrides=overrides)).decode_tps
        for overrides in ((), ((r"blk\.3\.ffn_up", "CPU"),), ((r"blk\.[3-5]\.ffn_up", "CPU"),), (("exps", "CPU"),),
                          (("exps|attn", "CPU"),))
    ]  # fmt: skip
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) == len(speeds)
    none = predicted(planned(overrides=(("nosuch", "CPU"),)))
    assert none.decode_tps == speeds[0]
    first_wins = predicted(planned(overrides=(("exps", "GPU0"), ("exps", "CPU"))))
    assert first_wins.decode_tps == speeds[0]


def test_everything_on_the_cpu_by_a_pattern_is_no_faster_than_the_cpu() -> None:
    alone = replace(planned(), model=replace(planned().model, n_gpu_layers=0))
    host = planned(overrides=((".", "CPU"),))
    assert predicted(host).decode_tps <= predicted(alone).decode_tps


def test_proportions_are_not_counts() -> None:
    """-ts 3,1 of 13 layers (the output is one) are 10 and 3, as the engine shares them out."""

    def shared(*split: float) -> Predicted:
        return predicted(planned(hardware=TWO, tensor_split=split, devices=("GPU0", "GPU1")), TWO)

    assert shared(3, 1) == shared(10, 3) != shared(1, 1)
    assert predicted(planned(hardware=TWO), TWO) == shared(2, 1), "6 and 3 GiB are free"


def test_rows_of_matrices_on_several_devices_are_not_predicted() -> None:
    assert planned(hardware=TWO, split_mode="row").predicted is None


def test_strict_and_no_memory() -> None:
    limits = Limits(n_ctx=4096, strict=True, placement=Placement(overrides=(("nosuch", "CPU"),)))
    with pytest.raises(UsageError, match="nosuch has no effect"):
        make_plan(CARD, EXPERTS, limits, lambda plan: counted(EXPERTS, plan))
    nothing = Limits(n_ctx=4096, vram=0)
    plan = make_plan(CARD, EXPERTS, nothing, lambda plan: counted(EXPERTS, plan)[:1])
    assert (plan.model.n_gpu_layers, plan.placement.devices, plan.bytes_device) == (0, (), 0)
    with pytest.raises(DoesNotFit):
        make_plan(CARD, EXPERTS, replace(nothing, n_gpu_layers=3), lambda _: (MemoryUse("CPU", 0, 0, 0),))
