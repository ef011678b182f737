"""What the planner promises: limits and settings kept, reasons given, few questions, errors that say what fits."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from planned import GIB, counted, dense, gpu, machine, moe

from hybridgen_gguf.cli.arguments import limits_of
from hybridgen_gguf.cli.options import PlaceFlags
from hybridgen_gguf.errors import DoesNotFit, UsageError
from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.model_file.shape import ModelShape
from hybridgen_gguf.plan import Draft, Limits, MemoryUse, Plan, make_plan
from hybridgen_gguf.plan.cost import work_of
from hybridgen_gguf.settings import Placement, Tiers

SHAPE = dense(16, 2048, 5632, 16, 4, 32000)
EXPERTS = moe(12, 1024, 512, 8, 4, 32000, 32, 4)
CARD = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20))
TWO = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20), gpu("GPU1", 3.0, 120, 8))
ALONE = machine(8, 45, 14)


class Counter:
    """Counts bytes, and how often it was asked."""

    def __init__(self, shape: ModelShape, devices: bool = True) -> None:
        self.shape, self.devices, self.asked = shape, devices, set[Draft]()

    def __call__(self, plan: Draft) -> tuple[MemoryUse, ...]:
        self.asked.add(plan)
        used = counted(self.shape, plan)
        return used if self.devices else used[:1]


def planned(hardware: Hardware, limits: Limits, shape: ModelShape = SHAPE) -> Plan:
    return make_plan(hardware, shape, limits, Counter(shape, bool(hardware.devices)))


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("hardware", [CARD, TWO], ids=["one", "two"])
@pytest.mark.parametrize("goal", ["decode", "prompt", "mixed"])
def test_never_more_than_the_budget(shape: ModelShape, hardware: Hardware, goal: str) -> None:
    for mib in (1, 60, 150, 300, 500, 700, 1000, 2000):
        plan = planned(hardware, Limits(n_ctx=4096, vram=mib << 20, goal=goal), shape)
        assert all(use.total <= mib << 20 for use in plan.memory if use.device != "CPU"), (mib, plan.memory)


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_more_memory_is_not_predicted_slower(shape: ModelShape) -> None:
    speeds = []
    for mib in (60, 150, 300, 450, 600, 800, 1200, 2000):
        plan = planned(CARD, Limits(n_ctx=4096, vram=mib << 20, goal="decode"), shape)
        assert plan.predicted is not None
        speeds.append(plan.predicted.decode_tps)
    assert speeds == sorted(speeds)


def test_few_questions() -> None:
    alone, card = Counter(SHAPE, devices=False), Counter(SHAPE)
    make_plan(ALONE, SHAPE, Limits(), alone)
    assert len(alone.asked) == 1
    make_plan(CARD, SHAPE, Limits(n_ctx=4096, vram=500 << 20), card)
    assert len(card.asked) <= 12
    assert len({(plan.placement.tiers, plan.context.n_ubatch) for plan in card.asked}) <= 8


def test_experts_leave_first() -> None:
    quick = machine(8, 45, 14, gpu("GPU0", 7.2, 250, 20), split=1e-6)  # the model is tiny, so crossings must be too
    plan = planned(quick, Limits(n_ctx=4096, vram=300 << 20, goal="decode"), EXPERTS)
    patterns = [pattern for pattern, _ in plan.placement.patterns if "exps" in pattern]
    assert patterns and plan.model.n_gpu_layers >= EXPERTS.n_layers
    assert all(to == "CPU" for _, to in plan.placement.patterns)


def test_what_the_user_fixed_stays() -> None:
    limits = Limits(n_ctx=2000, threads=3, n_gpu_layers=5, n_ubatch=128, type_k="q8_0", type_v="q8_0",
                    placement=Placement(kv_offload=False))  # fmt: skip
    plan = planned(CARD, limits)
    context = plan.context
    assert (context.n_ctx, context.threads, context.threads_batch, context.n_ubatch) == (2048, 3, 3, 128)
    assert plan.model.n_gpu_layers == 5 and plan.model.placement == context.placement
    assert (context.type_k, plan.placement.kv_offload, plan.placement.patterns) == ("q8_0", False, ())
    own = (("blk\\.1\\.", "CPU"),)
    assert planned(CARD, Limits(placement=Placement(overrides=own))).placement.patterns == own


def test_every_number_has_a_reason() -> None:
    plan = planned(CARD, Limits())
    named = {reason.name for reason in plan.reasons}
    assert {
        "threads",
        "threads_batch",
        "n_ubatch",
        "n_ctx",
        "n_gpu_layers",
        "kv type",
        "memory CPU",
        "predicted",
    } <= named
    assert all(reason.why for reason in plan.reasons)


def test_without_a_profile() -> None:
    bare = replace(CARD, cpu=replace(CARD.cpu, kernels=()), devices=(replace(CARD.devices[0], kernels=()),))
    plan = planned(bare, Limits(n_ctx=4096, vram=500 << 20))
    assert plan.predicted is None and plan.as_json()["predicted"] is None
    assert any("hgguf profile" in reason.why for reason in plan.reasons)
    assert plan.model.n_gpu_layers > 0


@pytest.mark.parametrize("goal", ["decode", "prompt"])
def test_a_goal_is_not_served_better_by_the_other(goal: str) -> None:
    field = f"{goal}_tps"
    speeds = {}
    for name in ("decode", "prompt"):
        plan = planned(CARD, Limits(n_ctx=8192, vram=450 << 20, goal=name, depth=4096))
        speeds[name] = getattr(plan.predicted, field)
    assert speeds[goal] >= max(speeds.values()) * 0.999


@pytest.mark.parametrize(
    "limits",
    [
        Limits(n_ctx=-1), Limits(vram=-5), Limits(ram=0), Limits(threads=0), Limits(n_batch=0), Limits(goal="speed"),
        Limits(depth=-1), Limits(n_batch=64, n_ubatch=128), Limits(flash_attention="off", type_v="q8_0"),
        Limits(n_ctx=1 << 40),
    ],
)  # fmt: skip
def test_absurd_limits_are_refused(limits: Limits) -> None:
    with pytest.raises(UsageError):
        planned(CARD, limits)


def test_an_impossible_budget_names_the_nearest() -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(ALONE, Limits(n_ctx=131072, ram=2 * GIB))
    fits = caught.value.nearest["n_ctx"]
    assert 0 < fits < 131072
    assert planned(ALONE, Limits(n_ctx=fits, ram=2 * GIB)).bytes_host <= 2 * GIB
    with pytest.raises(DoesNotFit) as caught:
        planned(CARD, Limits(n_ctx=4096, n_gpu_layers=99, vram=200 << 20))
    layers = caught.value.nearest["n_gpu_layers"]
    assert planned(CARD, Limits(n_ctx=4096, n_gpu_layers=max(layers, 1), vram=200 << 20)) if layers else True


def test_no_gpu() -> None:
    plan = planned(ALONE, Limits(n_gpu_layers=99))
    assert len(plan.warnings) == 1 and "nothing is offloaded" in plan.warnings[0]
    with pytest.raises(DoesNotFit, match="no device"):
        planned(ALONE, Limits(vram=GIB))


def test_the_context_shrinks_to_free_memory_unless_it_was_asked_for() -> None:
    small = machine(8, 45, 0.9)
    plan = planned(small, Limits())
    assert plan.context.n_ctx < 8192 and "capped" in plan.warnings[0]


def test_work_counts_every_weight_once() -> None:
    for shape in (SHAPE, EXPERTS):
        work = work_of(shape)
        placed = sum(layer.bytes_mixer + layer.bytes_heavy for layer in work.layers)
        embedding = next(t.bytes for t in shape.file.tensors if t.name == "token_embd.weight")
        assert placed == shape.bytes_weights - embedding


def test_arguments_of_llama_cpp() -> None:
    plan = planned(CARD, Limits(n_ctx=4096, vram=450 << 20, placement=Placement(use_mmap=False, use_mlock=True)))
    text = " ".join(plan.as_arguments())
    assert "--fit off -c 4096 -ngl" in text and text.endswith("-lm mlock")
    assert not any("," in pattern for pattern, _ in plan.placement.patterns), "llama.cpp splits -ot at commas"


def test_a_saved_plan_carries_its_whole_placement(tmp_path: Path) -> None:
    placement = Placement(
        overrides=(("blk\\.1\\.", "CPU"),), on_host=("blk.2.ffn_up.weight", "output.weight"),
        devices=("GPU0", "GPU1"), split_mode="row", main_gpu=1,
        tensor_split=(3.0, 1.0), use_mmap=False, use_mlock=True, kv_offload=False,
        tiers=Tiers(512, "q8_0", "recent", cpu_tokens=2, share=0.25),
    )  # fmt: skip
    assert all(getattr(placement, f.name) != getattr(Placement(), f.name) for f in fields(Placement)), "one is left out"
    plan = planned(CARD, Limits(n_ctx=4096)).with_placement(placement)
    plan = replace(plan, context=replace(plan.context, flash_attention="on"))
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"plan": plan.as_json()}), encoding="utf-8")
    limits = limits_of(PlaceFlags(plan=str(saved)))
    assert limits.placement == placement
    assert (limits.n_ctx, limits.n_gpu_layers, limits.flash_attention) == (4096, plan.model.n_gpu_layers, "on")
    other = limits_of(PlaceFlags(plan=str(saved), kv_vram="1GiB", flash_attn="off", device="GPU1")).placement
    assert (other.tiers, other.devices) == (None, ("GPU1",)), "flags win"
    old = {key: value for key, value in plan.as_json().items() if not hasattr(placement, key) and "tier_" not in key}
    saved.write_text(json.dumps(old), encoding="utf-8")
    assert limits_of(PlaceFlags(plan=str(saved))).placement == Placement()


def test_batches_grow_where_prompts_gain() -> None:
    """Weights on the host cross the link once for each batch; whoever only writes, or set a size, keeps it."""

    big = moe(48, 2048, 768, 32, 4, 151936, 128, 8)

    def size(goal: str, depth: int = 6000, n_ubatch: int | None = None) -> int:
        return planned(
            CARD, Limits(n_ctx=8192, vram=6 * GIB, depth=depth, n_ubatch=n_ubatch, goal=goal), big
        ).context.n_ubatch

    assert size("prompt") > 512 and size("mixed") == 2048
    assert size("decode") == 512 and size("mixed", depth=300) == 512 and size("prompt", n_ubatch=256) == 256
    small = planned(CARD, Limits(n_ctx=8192, depth=6000))
    assert small.context.n_ubatch == 512, "all fits"
