"""The engine edge: the right library, its identity, refusal of others, checks and byte counts in a child."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tinygguf import build

from hybridgen_gguf.engine import library as library_module
from hybridgen_gguf.engine.child import Child, check_loads
from hybridgen_gguf.engine.library import COMMIT, GGML_VERSION, Library
from hybridgen_gguf.engine.pin import SOURCE_SHA256
from hybridgen_gguf.errors import EngineError, EngineMismatch, UsageError
from hybridgen_gguf.loader import by_device, open_model, prepare
from hybridgen_gguf.plan import Limits
from hybridgen_gguf.settings import ContextSettings, ModelSettings

ROOT = Path(__file__).resolve().parent.parent.parent


def test_engine_says_what_it_is(engine: Library) -> None:
    series = (ROOT / "patches" / "series").read_text(encoding="utf-8").splitlines()
    names = tuple(line.removesuffix(".patch") for line in series if line and not line.startswith("#"))
    assert engine.commit == COMMIT and engine.patches == names
    assert "CPU" in engine.backends() and engine.devices()[0].memory_total > 0


def test_pin_and_code_name_the_same_sources() -> None:
    pin = json.loads((ROOT / "patches" / "pin.json").read_text(encoding="utf-8"))
    assert (pin["commit"], pin["ggml"]) == (COMMIT, GGML_VERSION)
    assert pin["sha256"] == SOURCE_SHA256
    assert f"{pin['package']}=={pin['version']}" in (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_every_switch_can_be_set_and_unknown_ones_are_refused(engine: Library) -> None:
    for switch in engine.switches():
        for value in (*switch.values, switch.value):
            engine.set_switch(switch.name, value)
            assert next(s.value for s in engine.switches() if s.name == switch.name) == value
    with pytest.raises(UsageError):
        engine.set_switch("no-such-switch", "on")


def test_library_of_another_commit_is_refused(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "COMMIT", "fffffffff")
    with pytest.raises(EngineMismatch, match=COMMIT):
        library_module.check(engine.folder)


def test_library_of_another_version_is_refused(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "GGML_VERSION", "9.9.9")
    with pytest.raises(EngineMismatch, match=r"9\.9\.9"):
        library_module.check(engine.folder)


def test_folder_without_an_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HGGUF_ENGINE", str(tmp_path))
    with pytest.raises(EngineError, match="holds no engine"):
        library_module.find()


def test_broken_library_is_one_line(tmp_path: Path) -> None:
    for name in ("libllama.so", "libggml-base.so"):
        (tmp_path / name).write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        library_module.check(tmp_path)


def test_child_survives_a_file_that_aborts_the_engine(tmp_path: Path, tiny: Path) -> None:
    build(str(tmp_path / "dup.gguf"), tokens={100: "<0x41>"})
    with Child() as child:
        problem = child.check(tmp_path / "dup.gguf")
        assert problem is not None and "SIGABRT" in problem and str(ROOT) not in problem.split("(")[1]
        assert child.check(tiny) is None
    assert check_loads(tmp_path / "missing.gguf") is not None


def test_child_that_hangs_is_ended(tiny: Path) -> None:
    with Child(timeout=0.0) as child:
        problem = child.check(tiny)
    assert problem is not None and "no answer" in problem


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("n_ctx", [512, 8192])
def test_bytes_on_the_cpu_are_what_loading_allocates(engine: Library, smollm2: Path, n_ctx: int, kv: str) -> None:
    prepared = prepare(smollm2, Limits(n_ctx=n_ctx, type_k=kv, type_v=kv, threads=1))
    with open_model(prepared) as opened:
        real = [use for use in opened.memory() if use.total]  # an RPC device of another test may be registered, empty
        _within_one_percent(prepared.plan.memory, tuple(real))


def _within_one_percent(planned: tuple, real: tuple) -> None:  # type: ignore[type-arg]
    assert {use.device for use in planned} == {use.device for use in real}
    by_name = {use.device: use for use in real}
    for use in planned:
        assert use.total == pytest.approx(by_name[use.device].total, rel=0.01)


_ON_RPC = """
import json, sys
from pathlib import Path
from hybridgen_gguf.settings import Placement
from hybridgen_gguf.loader import prepare, open_model
from hybridgen_gguf.plan import Limits
layers = None if sys.argv[3] == "auto" else int(sys.argv[3])
vram = None if sys.argv[4] == "-" else int(sys.argv[4])
limits = Limits(n_ctx=1024, n_gpu_layers=layers, vram=vram, threads=1, placement=Placement(use_mmap=False))
prepared = prepare(Path(sys.argv[1]), limits, rpc=[sys.argv[2]])
with open_model(prepared) as opened:
    real = opened.memory()
totals = [[[use.device, use.total] for use in uses] for uses in (prepared.plan.memory, real)]
print(json.dumps([prepared.plan.model.n_gpu_layers, *totals]))
"""


@pytest.mark.parametrize(("layers", "vram"), [("15", "-"), ("auto", "-"), ("auto", str(60 << 20))])
def test_bytes_on_a_second_device_are_what_loading_allocates(
    smollm2: Path, rpc_device: str, layers: str, vram: str
) -> None:
    # Without mmap: a mapping counts the whole range of the file, with the device's layers in its middle.
    # In a process of its own: a registered server stays registered, and other tests want a machine without one.
    command = [sys.executable, "-c", _ON_RPC, str(smollm2), rpc_device, layers, vram]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    n_gpu_layers, planned, real = json.loads(done.stdout)
    planned, real = dict(planned), dict(real)
    assert set(planned) == set(real) and len(planned) == 2
    for device, total in planned.items():
        assert total == pytest.approx(real[device], rel=0.01)
    if vram != "-":
        device = next(name for name in planned if name != "CPU")
        assert 0 < n_gpu_layers < 31 and real[device] <= int(vram)


def test_unpatched_engine_works_with_a_warning(engine: Library, smollm2: Path, tmp_path: Path) -> None:
    """A library without our symbols: the same one, with the names of its C API overwritten in place."""
    stock = tmp_path / "engine"
    shutil.copytree(engine.folder, stock, symlinks=True)
    for path in stock.glob("lib*.so*"):
        if not path.is_symlink():
            data = path.read_bytes()
            path.write_bytes(
                data.replace(b"\0hg_commit\0", b"\0xx_commit\0").replace(b"\0hg_memory\0", b"\0xx_memory\0")
            )
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from hybridgen_gguf.engine.library import load\n"
        "try:\n    load()\nexcept RuntimeWarning as w:\n    print('warned', 'no patches' in str(w))\n"
    )
    environment = {**os.environ, "HGGUF_ENGINE": str(stock)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "warned True", done.stderr
    run = [
        sys.executable,
        "-m",
        "hybridgen_gguf",
        "run",
        str(smollm2),
        "-p",
        "Hi",
        "-n",
        "4",
        "--temp",
        "0",
        "-c",
        "512",
    ]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "no patches" in done.stderr


def test_child_counts_without_allocating(smollm2: Path) -> None:
    """A context of 48 GiB is counted in a machine that could not hold it."""
    settings = ContextSettings(n_ctx=1 << 21, threads=1, threads_batch=1)
    with Child() as child:
        used = by_device(child.memory(smollm2, ModelSettings(), settings))
        smaller = by_device(child.memory(smollm2, ModelSettings(), replace(settings, n_ctx=1 << 20)))
    assert used[0].kv == 2 * smaller[0].kv > 20 << 30
