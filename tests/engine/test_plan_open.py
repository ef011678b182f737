"""Plans from a file to an open model: several unequal devices, no vocabulary, a stale profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from conftest import ROOT, serving
from planned import gpu, machine
from tinygguf import build

from hybridgen_gguf.engine.child import Child
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.loader import Prepared, open_model, oracle, prepare, with_engine_devices
from hybridgen_gguf.machine import profile
from hybridgen_gguf.machine.probe import read_hardware
from hybridgen_gguf.model_file.shape import read_shape
from hybridgen_gguf.plan import Limits, make_plan
from hybridgen_gguf.settings import Placement

MIB = 1 << 20
# In a process of its own: devices stay registered.
_SEVERAL = """
import json, sys
from dataclasses import replace
from pathlib import Path
from hybridgen_gguf.engine.child import Child
from hybridgen_gguf.settings import Placement
from hybridgen_gguf.loader import Prepared, open_model, oracle, with_engine_devices
from hybridgen_gguf.plan import Limits, make_plan
from hybridgen_gguf.plan.inputs import DEVICE_MARGIN
from hybridgen_gguf.machine.probe import read_hardware
from hybridgen_gguf.model_file.shape import read_shape

path, room, rpc = Path(sys.argv[1]), json.loads(sys.argv[2]), tuple(sys.argv[3:])
shape = read_shape(path)
limits = Limits(n_ctx=2048, n_ubatch=64, threads=1, placement=Placement(use_mmap=False))
with Child(rpc) as child:
    hardware = with_engine_devices(read_hardware(), child)
    devices = [replace(device, memory_free=DEVICE_MARGIN + free)
               for device, free in zip(hardware.devices, room, strict=True)]
    hardware = replace(hardware, devices=tuple(devices))
    plan = make_plan(hardware, shape, limits, oracle(child, shape, hardware))
with open_model(Prepared(path, hardware, shape, plan, rpc)) as opened:
    assert opened.context.decode([5, 6, 7])
    opened.context.synchronize()
    uses = (plan.memory, opened.memory())
    logits = [float(value) for value in opened.context.logits()[:8]]
print(json.dumps({"names": [device.name for device in devices], "devices": plan.placement.devices,
                  "split": plan.placement.tensor_split, "layers": plan.model.n_gpu_layers, "logits": logits,
                  "bytes": [{use.device: use.total for use in found if use.total} for found in uses]}))
"""


@pytest.fixture(scope="module")
def three(engine: Library) -> Iterator[list[str]]:
    """Three RPC servers."""
    with serving() as one, serving() as two, serving() as three:
        yield [one, two, three]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers, 27 MB of weights and 16 MiB of KV."""
    path = tmp_path_factory.mktemp("several") / "model.gguf"
    return build(path, embd=512, ff=1024, layers=8, ctx=8192, heads=8, kv=4, wtype="f16", tied=False)


@pytest.mark.parametrize("room", [[12, 20], [30, 8], [9, 14, 20], [25, 4, 12], [0, 1, 16], [0, 0, 0]])
def test_several_unequal_devices(model: Path, three: list[str], room: list[int]) -> None:
    command = [sys.executable, "-c", _SEVERAL, str(model), json.dumps([mib * MIB for mib in room])]
    done = subprocess.run([*command, *three[: len(room)]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    foretold, allocated = found["bytes"]
    assert foretold == allocated
    free = dict(zip(found["names"], (mib * MIB for mib in room), strict=True))
    assert all(size <= free[name] for name, size in allocated.items() if name != "CPU"), found
    if sum(room) > 10:
        assert found["layers"] > 0
    used = [name for name in allocated if name != "CPU" and free[name] > 8 * MIB]
    assert len(used) == sum(mib > 8 for mib in room), "a device with room for layers is left out"
    alone = subprocess.run([*command[:-1], "[0]", three[0]], capture_output=True, text=True, timeout=120)
    assert json.loads(alone.stdout)["logits"] == pytest.approx(found["logits"], abs=2e-2)


def test_no_vocabulary(engine: Library, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    try:
        from plan_models import write_model
    finally:
        sys.path.pop(0)
    path = tmp_path / "bare.gguf"
    write_model(path, "tiny")
    assert prepare(path, Limits(n_ctx=256)).plan.context.n_ctx == 256, "a plan needs no vocabulary"
    command = [sys.executable, "-m", "hybridgen_gguf", "run", str(path), "-p", "x", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "has no vocabulary" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "change", [{"fingerprint": "another"}, {"busy": 0.9}, {"measured": "2020-01-01T00:00:00+00:00"}]
)
def test_a_stale_profile_is_said(
    engine: Library, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    with Child() as child:
        hardware = with_engine_devices(read_hardware(), child)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = profile.Profile(profile.fingerprint_of(hardware), now, 1.0, 0.0, hardware)
    monkeypatch.setenv("HGGUF_PROFILE", str(tmp_path / "profile.json"))
    profile.save(found, tmp_path / "profile.json")
    assert not prepare(tiny, Limits()).plan.warnings
    profile.save(replace(found, **change), tmp_path / "profile.json")  # type: ignore[arg-type]
    plan = prepare(tiny, Limits()).plan
    assert len(plan.warnings) == 1 and "run `hgguf profile` again" in plan.warnings[0]
    assert [reason.why for reason in plan.reasons if reason.name == "predicted"] == [plan.warnings[0]]


def test_two_memories_by_the_planner_itself(engine: Library, rpc_device: str, tmp_path: Path) -> None:
    """Where it is predicted fastest: foretold to the byte, within the budget, and host cells in use."""
    model = build(tmp_path / "model.gguf", embd=256, ff=256, layers=16, ctx=8192, heads=4, kv=4, wtype="f16")
    hardware = machine(2, 20, 8, gpu("RPC0", 8, 400, 40), split=1e-6)
    kernels = tuple(
        replace(rate, gflops=2 * rate.gflops)
        if rate.operation.startswith("attention")
        else replace(rate, gbps=rate.gbps / 5)
        if rate.operation.startswith("matvec")
        else rate
        for rate in hardware.cpu.kernels
    )
    hardware = replace(hardware, cpu=replace(hardware.cpu, kernels=kernels))
    place = Placement(use_mmap=False, devices=("RPC0",))  # others may be registered
    limits = Limits(n_ctx=8192, depth=8000, vram=80 * MIB, n_ubatch=32, goal="decode", threads=1, placement=place)
    shape = read_shape(model)
    with Child((rpc_device,)) as child:
        plan = make_plan(hardware, shape, limits, oracle(child, shape, hardware))
    assert plan.placement.tiers is not None and plan.kv.cells_host > 0
    assert plan.bytes_device <= 80 * MIB and plan.predicted is not None
    plan = plan.with_placement(replace(plan.placement, tiers=replace(plan.placement.tiers, cells=256)))  # soon full
    with Child((rpc_device,)) as child:
        foretold = {use.device: use for use in oracle(child, shape, hardware)(plan) if use.total}
    with open_model(Prepared(model, hardware, shape, plan, (rpc_device,))) as opened:
        for _ in range(10):
            assert opened.context.decode([5] * 32)
        assert opened.context.decode([6])
        opened.context.synchronize()
        counters = opened.context.tier_counters()
        assert counters is not None and counters.cells_host > 0 and counters.steps_tiered > 0
        assert {use.device: use for use in opened.memory() if use.total} == foretold


def test_flags_of_stock_for_a_plan_that_stock_cannot_do(engine: Library, rpc_device: str, model: Path) -> None:
    command = [sys.executable, "-m", "hybridgen_gguf", "plan", str(model), "-c", "1024", "--rpc", rpc_device]
    plain, parted = (
        subprocess.run([*command, "--format", "args", *more], capture_output=True, text=True, timeout=120)
        for more in ((), ("--kv-vram", "1MiB"))
    )
    assert plain.returncode == parted.returncode == 0
    assert "nearest" not in plain.stderr and "two memories, which stock llama.cpp cannot" in parted.stderr
    assert parted.stdout == plain.stdout and "-fa auto" in parted.stdout
