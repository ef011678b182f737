"""Placements that `tune` tries: what is near a plan, what fits, and what becomes of one that is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from planned import counted, dense, gpu, machine, moe
from tinygguf import build

from hybridgen_gguf import tuned
from hybridgen_gguf.cli.measure import _searched
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import EngineError
from hybridgen_gguf.loader import prepare
from hybridgen_gguf.plan import Draft, Limits, MemoryUse, Plan, make_plan
from hybridgen_gguf.plan.cost import work_of
from hybridgen_gguf.plan.search import heavy_layers
from hybridgen_gguf.settings import Placement, Tiers
from hybridgen_gguf.tune.places import Places, applied, may_vary, near
from hybridgen_gguf.tune.search import Sample, axes_of, search, start_of
from hybridgen_gguf.tuned import Place, Setting, Tuned, recall, remember

GIB, MIB = 1 << 30, 1 << 20
SHAPE = dense(16, 1024, 2816, 16, 4, 32000)
CARD = machine(8, 60, 28, gpu("GPU0", 0.35, 400, 30))
WORK = work_of(SHAPE)


def planned(**limits: object) -> Plan:
    asked = Limits(n_ctx=2048, **limits)  # type: ignore[arg-type]
    return make_plan(CARD, SHAPE, asked, lambda plan: counted(SHAPE, plan))


def setting_of(plan: Plan) -> Setting:
    return replace(start_of(plan), place=Place.of(plan))


def heavy_on_host(plan: Draft) -> frozenset[int]:
    return heavy_layers(WORK, plan.placement)


def test_one_step_away() -> None:
    plan = planned().with_placement(Placement(), 10)
    found = {(p.model.n_gpu_layers, len(heavy_on_host(p)), p.placement.kv_offload) for p in near(plan, WORK)}
    assert found == {(11, 0, True), (9, 0, True), (10, 1, True), (11, 1, True), (10, 0, False)}


def test_a_part_on_the_cpu_comes_back() -> None:
    plan = planned().with_placement(Placement(), 17)
    more = next(p for p in near(plan, WORK) if heavy_on_host(p))
    assert heavy_on_host(more) == {0} and more.model.n_gpu_layers == 17
    assert any(not heavy_on_host(p) and p.model.n_gpu_layers == 17 for p in near(more, WORK))


def test_experts_stay_together() -> None:
    shape = moe(6, 512, 256, 8, 4, 32000, 16, 4)
    plan, work = planned().with_placement(Placement(), 7), work_of(shape)
    kept = [p.placement.patterns for p in near(plan, work) if heavy_layers(work, p.placement)]
    assert kept and all("exps" in pattern for ((pattern, _),) in kept)


def test_ends_of_the_range() -> None:
    none = planned().with_placement(Placement(), 0)
    assert {p.model.n_gpu_layers for p in near(none, WORK)} == {1}
    every = none.with_layers(17)
    assert max(p.model.n_gpu_layers for p in near(every, WORK)) == 17


def test_a_border_between_tiers_moves() -> None:
    parted = Placement(tiers=Tiers(1024))
    plan = planned().with_placement(parted, 17)
    cells = {p.placement.tiers and p.placement.tiers.cells for p in near(plan, WORK)}
    assert cells == {768, 1024, 1280}
    assert all(p.placement.kv_offload for p in near(plan, WORK))


def test_only_what_fits() -> None:
    def bytes_of(plans: Sequence[Draft]) -> list[tuple[MemoryUse, ...]]:
        return [counted(SHAPE, plan) for plan in plans]

    plan = planned()
    budget = sum(use.total for use in plan.memory if use.device != "CPU")  # not a byte more than the plan takes
    places = Places(plan, WORK, {"GPU0": budget, "CPU": 28 * GIB}, bytes_of)
    found = places.around(setting_of(plan))
    assert found
    for setting in found:
        used = counted(SHAPE, applied(plan, setting))
        assert sum(use.total for use in used if use.device != "CPU") <= budget
    everything = replace(setting_of(plan), place=Place(17, Placement(), 2048))
    assert places.fitting([everything]) == []


@pytest.mark.parametrize(
    "limits",
    [{"n_gpu_layers": 3}, {"placement": Placement(overrides=(("ffn", "CPU"),))}, {"kv_vram": MIB},
     {"placement": Placement(split_mode="row")}],
)  # fmt: skip
def test_what_the_user_fixed_is_not_varied(limits: dict[str, object]) -> None:
    assert may_vary(Limits(), planned())
    assert not may_vary(Limits(**limits), planned())  # type: ignore[arg-type]


class Layered:
    """A layer on the device saves a twentieth, a kept FFN costs a fortieth; more than 12 layers cannot be opened."""

    def __init__(self) -> None:
        self.left = 1000.0

    def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample:
        self.left -= 1
        assert setting.place is not None
        if setting.place.n_gpu_layers > 12:
            raise EngineError("no memory on the device")
        kept = heavy_on_host(applied(planned().with_layers(0), setting))
        seconds = 0.02 * (1 - setting.place.n_gpu_layers / 20 + len(kept) / 40)
        return Sample(seconds, seconds / 5)

    def seconds_left(self) -> float:
        return self.left


def test_the_search_follows_layers_and_survives_what_cannot_be_opened() -> None:
    plan = planned().with_placement(Placement(), 9)
    places = Places(plan, WORK, {"CPU": 1}, lambda plans: [() for _ in plans])
    fixed = Limits(threads=1, n_ubatch=512, type_k="q8_0", flash_attention="on")
    result = search(Layered(), setting_of(plan), axes_of(fixed, 1, ("f16",), places.around), "decode", 512)
    assert result.best.setting.place == Place(12, Placement(), 2048)
    assert any("no memory on the device" in trial.note for trial in result.trials)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tune") / "model.gguf", embd=256, ff=512, layers=4, ctx=1024, heads=4, kv=2,
                 wtype="f16", tied=False)  # fmt: skip


def test_on_a_real_device(engine: Library, rpc_device: str, model: Path) -> None:
    """Every placement that was measured fits the budget, and there were several."""
    limits = Limits(n_ctx=512, vram=7 * MIB, threads=1, n_ubatch=64, type_k="q8_0", flash_attention="on")
    prepared = prepare(model, limits, rpc=(rpc_device,))
    found = _searched(prepared, limits, 20.0, 0.01)
    places = {trial.setting.place for trial in found.search.trials if trial.samples}
    assert len(places) > 2 and None not in places
    assert all(use.total <= 7 * MIB for use in found.plan.memory if use.device != "CPU")
    assert found.search.best.setting.place in places


def test_remembered_and_put_to_use(
    engine: Library, rpc_device: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGGUF_DATA", str(tmp_path))
    limits = Limits(n_ctx=512, vram=7 * MIB)
    plain = prepare(model, limits, rpc=(rpc_device,))
    key = tuned.key_of(plain.hardware, plain.shape, limits)
    place = Place(1, Placement(overrides=((r"blk\.(3)\.(ffn_up\.weight)", "CPU"),), kv_offload=False), 512)
    entry = Tuned(replace(start_of(plain.plan), place=place), 1.0, 1.0, "mixed", 64, "2026-11-30")
    remember(key, entry)
    assert recall(key) == entry
    used = prepare(model, limits, rpc=(rpc_device,), use_tuned=True).plan
    assert (used.model.n_gpu_layers, used.placement) == (1, place.placement)

    tuned_or_not = [
        prepare(model, replace(limits, n_ctx=256), rpc=(rpc_device,), use_tuned=t).plan for t in (True, False)
    ]
    assert tuned_or_not[0].placement == tuned_or_not[1].placement != place.placement, "tuned for another context"

    too_much = replace(entry, setting=replace(entry.setting, place=Place(5, Placement(), 512)))
    remember(key, too_much)  # as if less memory were free than when it was tuned
    used = prepare(model, limits, rpc=(rpc_device,), use_tuned=True).plan
    assert used.model.n_gpu_layers == plain.plan.model.n_gpu_layers < 5
    assert any(reason.name == "tune" for reason in used.reasons)
