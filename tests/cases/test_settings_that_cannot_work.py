"""Threads, KV forecasts, GPU flags without a GPU, contexts and settings that cannot go together: through the verbs.

Cases D-11 to D-17.
"""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tinygguf
from command_line import COMMAND, QUIET, call, refused

Capture = pytest.CaptureFixture[str]
MIB = 1 << 20


def planned(capsys: Capture, *arguments: object, **environment: str) -> dict[str, Any]:
    done = call(capsys, "plan", *arguments, "--json", **environment)
    assert done.code == 0, done
    plan: dict[str, Any] = done.json["plan"]
    return plan


def reason(plan: dict[str, Any], name: str) -> str:
    return next(str(entry["why"]) for entry in plan["reasons"] if entry["name"] == name)


def test_d11_bound_to_one_cpu(tiny: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [*COMMAND, "plan", tiny, "--explain"], capture_output=True, text=True, timeout=60, check=True,
        env={**QUIET, "HGGUF_THREADS": ""}, preexec_fn=lambda: os.sched_setaffinity(0, [cpu]),
    )  # fmt: skip
    assert "threads            1 for decode, 1 for prefill" in done.stdout
    assert "affinity" in done.stdout


def test_d12_threads(tiny: Path, capsys: Capture) -> None:
    cores = planned(capsys, tiny, HGGUF_THREADS="")["threads"]["decode"]
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert planned(capsys, tiny, "-t", -1)["threads"]["decode"] == cores
    many = planned(capsys, tiny, "-t", 64)
    assert many["threads"] == {"decode": 64, "prompt": 64}
    assert f"64 threads on {cores} usable cores" in many["warnings"][0]
    assert "warning: 64 threads on" in call(capsys, "run", tiny, "-t", 64, "-n", 1, "-p", "x").err
    for wrong in (0, -2, 1025, 99999999999999999999, "abc", "1.5"):
        refused(call(capsys, "run", tiny, "-t", wrong, "-n", 1, "-p", "x"), 2, "-t")
        refused(call(capsys, "plan", tiny, "-tb", wrong), 2, "-tb")


@pytest.mark.parametrize(("kind", "mib"), [("f16", 180.0), ("q8_0", 95.625), ("q4_0", 50.625)])
def test_d13_kv_bytes_follow_the_type(smollm2: Path, capsys: Capture, kind: str, mib: float) -> None:
    for attention in ("on", "auto"):
        plan = planned(
            capsys, smollm2, "-c", 8192, "--cache-type-k", kind, "--cache-type-v", kind, "--flash-attn", attention
        )
        assert plan["kv"]["bytes"] == mib * MIB


def test_d13_a_smaller_cache_never_lowers_the_layers(smollm2: Path, capsys: Capture, rpc_device: str) -> None:
    before = 0
    for budget in ("200MiB", "300MiB"):
        layers = [
            planned(capsys, smollm2, "-c", 8192, "--rpc", rpc_device, "--vram", budget, "-ctk", kind, "-ctv", kind)
            for kind in ("f16", "q8_0", "q4_0")
        ]
        assert all(plan["bytes"]["device"] <= int(budget[:3]) * MIB for plan in layers)
        counts = [plan["n_gpu_layers"] for plan in layers]
        assert counts == sorted(counts) and counts[0] >= before
        before = counts[0]


def test_d14_windows_are_not_charged_the_full_context(gemma3: Path, capsys: Capture) -> None:
    plan = planned(capsys, gemma3, "-c", 32768)
    assert abs(plan["kv"]["bytes"] - 111 * MIB) <= MIB


@pytest.mark.parametrize("flag", [("-ngl", "99"), ("-ngl", "-1"), ("-ngl", "all"), ("--gpu-layers", "1")])
def test_d15_layers_for_a_gpu_that_is_not_there(tiny: Path, capsys: Capture, flag: tuple[str, str]) -> None:
    done = call(capsys, "run", tiny, *flag, "-n", 1, "-p", "hi", CUDA_VISIBLE_DEVICES="")
    assert done.code == 0
    warnings = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "nothing is offloaded" in warnings[0]
    assert planned(capsys, tiny, *flag)["n_gpu_layers"] == 0


def test_d15_a_budget_for_a_gpu_that_is_not_there(tiny: Path, capsys: Capture) -> None:
    refused(call(capsys, "plan", tiny, "--vram", "8GiB"), 3, "--vram", "no device")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """88 MB of weights, trained for a million tokens, 48 GiB of KV in full."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    sets = ["llama.context_length=u32:1048576"]
    return tinygguf.build(path, embd=512, ff=512, heads=8, kv=8, layers=24, wtype="f16", sets=sets)


def test_d16_the_default_context_is_capped_and_stated(big: Path, capsys: Capture) -> None:
    plan = planned(capsys, big)
    assert plan["n_ctx"] == 8192 and "default" in reason(plan, "n_ctx")
    capped = planned(capsys, big, "--ram", "400MiB")
    assert 256 <= capped["n_ctx"] < 8192 and capped["bytes"]["host"] <= 400 * MIB
    assert "capped" in reason(capped, "n_ctx") and "context capped" in capped["warnings"][0]


def test_d16_too_much_is_refused_and_the_hint_works(big: Path, capsys: Capture) -> None:
    done = call(capsys, "run", big, "-c", 65536, "--ram", "1GiB", "-n", 1, "-p", "hi")
    refused(done, 3, "context of 65536 tokens needs 3.15 GiB", "--ram is 1.00 GiB")
    fits = done.err.rpartition("-c ")[2].strip()
    assert call(capsys, "run", big, "-c", fits, "--ram", "1GiB", "-n", 1, "-p", "hi", "--dry-run").code == 0
    more = int(fits) + 256
    refused(call(capsys, "plan", big, "-c", more, "--ram", "1GiB"), 3)
    refused(call(capsys, "plan", big, "--ram", "10MiB"), 3, "--ram")


def test_d16_a_limit_on_the_process_counts_as_memory(big: Path) -> None:
    limit = 2 << 30
    done = subprocess.run(
        [*COMMAND, "run", big, "-c", "65536", "-n", "1", "-p", "hi"], capture_output=True, text=True, timeout=60,
        env=QUIET, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)), check=False,
    )  # fmt: skip
    assert done.returncode == 3 and "needs 3.15 GiB" in done.stderr and "would fit" in done.stderr


@pytest.mark.parametrize("tokens", [2147483392, 1_000_000_000])
def test_d16_what_no_machine_holds(tiny: Path, capsys: Capture, tokens: int) -> None:
    refused(call(capsys, "run", tiny, "-c", tokens, "-p", "hi", "-n", 1), 3, "needs", "free memory")


@pytest.mark.parametrize("tokens", [2147483393, 4294967296, 99999999999999999999, -1, -(1 << 40)])
def test_d16_what_is_no_context(tiny: Path, capsys: Capture, tokens: int) -> None:
    refused(call(capsys, "run", tiny, "-c", tokens, "-p", "hi", "-n", 1), 2, f"-c {tokens}")


def test_d16_above_the_trained_length_warns_and_runs(tiny: Path, capsys: Capture) -> None:
    done = call(capsys, "run", tiny, "-c", 4096, "-p", "hi", "-n", 2)
    assert done.code == 0 and "warning: context 4096 is above the 128 tokens" in done.err


def test_d16_a_tiny_context_is_reported_as_it_is(tiny: Path, capsys: Capture) -> None:
    for given, real in ((1, 256), (64, 256), (257, 512)):
        plan = planned(capsys, tiny, "-c", given)
        assert plan["n_ctx"] == real and f"from {given}" in reason(plan, "n_ctx")
    assert call(capsys, "run", tiny, "-c", 1, "-p", "hi", "-n", 1, "--json").json["plan"]["n_ctx"] == 256


def test_d16_a_prompt_longer_than_the_context(tiny: Path, capsys: Capture) -> None:
    done = call(capsys, "run", tiny, "-c", 256, "-p", "word " * 200, "-n", 2)
    refused(done, 3, "the prompt has 1", "the context holds 256")
    enough = done.err.rpartition("-c ")[2].split()[0]
    assert call(capsys, "run", tiny, "-c", enough, "-p", "word " * 200, "-n", 1).code == 0


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("-ctv", "q8_0", "-fa", "off"), ("-ctv q8_0", "-fa off")),
        (("--cache-type-v", "q4_0", "--flash-attn", "0"), ("-ctv q4_0", "-fa off")),
        (("-ctv", "q8_0", "-fa", "on"), ("-ctv q8_0", "blocks of 32", "heads have 16")),
        (("-ctk", "q4_0"), ("-ctk q4_0", "heads have 16")),
        (("-b", "0"), ("-b 0",)),
        (("-b", "-5"), ("-b -5",)),
        (("-ub", "-5"), ("-ub -5",)),
        (("-b", "99999999999"), ("-b 99999999999",)),
        (("-ub", "1048577"), ("-ub 1048577",)),
        (("-b", "32", "-ub", "64"), ("-ub 64", "-b 32")),
        (("-c", "-1"), ("-c -1",)),
    ],
)
def test_d17_settings_that_cannot_go_together(
    tiny: Path, capsys: Capture, flags: tuple[str, ...], names: tuple[str, ...]
) -> None:
    for verb in (("run", tiny, "-p", "hi", "-n", 1), ("plan", tiny)):
        refused(call(capsys, *verb, *flags), 2, *names)


@pytest.mark.parametrize(
    "flags", [("-b", "1"), ("-b", "3", "-ub", "2"), ("-ctk", "bf16", "-ctv", "f32"), ("-fa", "off")]
)
def test_d17_unusual_settings_that_can(tiny: Path, capsys: Capture, flags: tuple[str, ...]) -> None:
    done = call(capsys, "run", tiny, "-p", "hello there", "-n", 4, "--temp", 0, *flags)
    assert done.code == 0 and done.out == call(capsys, "run", tiny, "-p", "hello there", "-n", 4, "--temp", 0).out
