"""KV in two memories gives what one memory gives: every split, policy, sequence operation and state, over RPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("tiers_child.py")
ROOT = CHILD.parent.parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random F32 weights: without quantized products two ways of attending differ by F16 rounding alone."""
    from tinygguf import build

    path = tmp_path_factory.mktemp("tiers") / "tiny.gguf"
    build(str(path), embd=256, ff=256, layers=3, ctx=1024, heads=4, kv=2)
    return path


def scenario(name: str, endpoint: str, path: Path, prefetch: str = "on") -> Any:
    # spinning threads of two processes on two cores wait for each other
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", "HGGUF_KV_PREFETCH": prefetch}
    done = subprocess.run(
        [sys.executable, str(CHILD), endpoint, str(path), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on_device"]
    return found["result"]


def assert_same(found: dict[str, Any], limit: float = 2e-2) -> None:
    assert found["max"] < limit and found["kl"] < limit * 1e-2, found


@pytest.mark.parametrize("prefetch", ["off", "on"])
def test_every_split_gives_the_same_logits(rpc_device: str, model: Path, prefetch: str) -> None:
    for found in scenario("splits", rpc_device, model, prefetch):
        assert_same(found)
        counters = found["counters"]
        assert counters["size_device"] == min(found["cells"], 512)
        assert counters["cells_device"] + counters["cells_host"] == 512
        if found["cells"] == 512:
            assert counters["steps_tiered"] == 0 and counters["bytes_host"] == 0 == counters["bytes_streamed"]
            assert found["max"] == 0.0, "with no host cell the graph is the stock graph"
        elif found["cpu_tokens"] == 0:
            assert counters["bytes_host"] == 0 < counters["bytes_streamed"]
            assert counters["stores_sent"] > 0, "the device stores a prompt's rows itself"
        else:
            assert counters["bytes_host"] > 0 and counters["head_starts"] > 0


def test_the_recent_policy_moves_cells_and_changes_nothing(rpc_device: str, model: Path) -> None:
    found = scenario("recent", rpc_device, model)
    assert_same(found)
    counters = found["counters"]
    assert counters["bytes_moved"] > 0 and counters["cells_host"] > 0
    assert counters["cells_device"] > 256 - 64, "the device stays nearly full"


def test_sequences_are_copied_and_removed(rpc_device: str, model: Path) -> None:
    found = scenario("sequences", rpc_device, model)
    for kind, one in found.items():
        assert_same(one, 0.3 if "q8_0" in kind else 2e-2)
        assert one["counters"]["steps_tiered"] > 0
    assert found["unified, recent"]["counters"]["bytes_moved"] > 0 < found["streams, recent"]["counters"]["bytes_moved"]


@pytest.mark.parametrize("prefetch", ["off", "on"])
def test_micro_batches_of_2048_tokens(rpc_device: str, model: Path, prefetch: str) -> None:
    found = scenario("large_batches", rpc_device, model, prefetch)
    assert_same(found["f16"])
    assert_same(found["none"])
    assert found["q8_0"]["kl"] < 1e-2, found
    for name, one in found.items():
        counters = one["counters"]
        assert counters["steps_streamed"] > 0 < counters["bytes_host"]
        assert (counters["stores_sent"] > 0) == (name != "q8_0"), "another type is made by the CPU"


@pytest.mark.parametrize("prefetch", ["off", "on"])
def test_host_cells_shared_between_cpu_and_device(rpc_device: str, model: Path, prefetch: str) -> None:
    for name, found in scenario("shared", rpc_device, model, prefetch).items():
        assert_same(found, 0.3 if "q8_0" in name else 2e-2)
        counters = found["counters"]
        assert counters["bytes_host"] > 0 and counters["head_starts"] > 0
        assert counters["steps_streamed"] < counters["steps_tiered"]


def test_rows_that_are_scattered_are_stored_by_the_cpu(rpc_device: str, model: Path) -> None:
    found = scenario("scattered", rpc_device, model)
    assert_same(found)
    assert found["counters"]["bytes_streamed"] > 0


def test_positions_shift_in_both_tiers(rpc_device: str, model: Path) -> None:
    found = scenario("shift", rpc_device, model)
    assert_same(found["f16"])
    assert_same(found["q8_0"], 0.3)  # requantized twice, in another order of sums
    assert found["mixed"]["kl"] < 1e-2, found


def test_a_state_does_not_tell_where_cells_lay(rpc_device: str, model: Path) -> None:
    for way, found in scenario("state", rpc_device, model).items():
        assert_same(found, 0.3 if "q8_0" in way else 2e-2)


@pytest.fixture(scope="module")
def wide(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with F32 weights: its quantized products move the logits more than a quantized cache does."""
    from attention_quality import widened

    return widened(smollm2, tmp_path_factory.mktemp("wide"))


def test_a_quantized_host_tier_costs_less_than_a_quantized_cache(rpc_device: str, wide: Path) -> None:
    found = scenario("quantized", rpc_device, wide)
    assert 0 < found["tiers"] < found["stock"], found
    assert found["device"] < 1.2 * found["stock"], found


def test_text_stays_while_the_border_moves(rpc_device: str, wide: Path) -> None:
    for found in scenario("recent_text", rpc_device, wide):
        assert found["differs_at"] is None or found["gap"] < 0.05, found
        counters = found["counters"]
        assert counters["bytes_moved"] > 0 and counters["cells_device"] > found["cells"] - 16


def test_windows_and_a_moving_border(rpc_device: str, gemma3: Path) -> None:
    for found in scenario("recent_windows", rpc_device, gemma3):
        assert found["differs_at"] is None or found["gap"] < 1.0, found
        assert found["counters"]["bytes_moved"] > 0


def test_greedy_text_of_a_real_model(rpc_device: str, smollm2: Path) -> None:
    for found in scenario("greedy", rpc_device, smollm2):
        # stock itself, cut into other micro-batches, moves this model's logits by up to 1
        assert found["differs_at"] is None or found["gap"] < 1.0, found


def test_sliding_windows_stay_on_the_device(rpc_device: str, gemma3: Path) -> None:
    for found in scenario("windows", rpc_device, gemma3):
        assert found["differs_at"] is None or found["gap"] < 1.0, found
        # 3 of 18 layers see the whole context: K and V of one head of 256 in f16
        assert found["counters"]["size_host_bytes"] <= (768 + 256) * 3 * 2 * 256 * 2


def test_what_cannot_be_had_is_said(rpc_device: str, smollm2: Path) -> None:
    found = scenario("refusals", rpc_device, smollm2)
    assert not found["made"] and found["alive"]
    assert "GiB" in found["reason"]
