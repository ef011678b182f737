"""`hgguf run` with its KV in two memories: the text of one memory, cells where the plan says, counters in the JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinygguf import build

PROMPT = "the fox and the crow " * 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiers") / "tiny.gguf"
    build(str(path), embd=256, heads=4, kv=2, layers=3, ctx=1024)
    return path


def run(model: Path, endpoint: str, *more: str, tokens: int = 24) -> dict[str, Any]:
    command = [sys.executable, "-m", "hybridgen_gguf", "run", str(model), "--raw", "-p", PROMPT, "-n", str(tokens)]
    command += ["--temp", "0", "--ignore-eos", "--rpc", endpoint, "--json", *more]
    if "--plan" not in more:
        command += ["-c", "1024", "-ngl", "all", "-fa", "on"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("kv_vram", ["0", "192KiB", "400KiB"])
def test_text_and_cells(model: Path, rpc_device: str, kv_vram: str) -> None:
    # a cell of 3 layers of 2 heads of 64, K and V in f16, takes 1,536 bytes
    one = run(model, rpc_device)
    two = run(model, rpc_device, "--kv-vram", kv_vram)
    assert two["tokens"] == one["tokens"] and "tiers" not in one
    cells = {"0": 0, "192KiB": 0, "400KiB": 256}[kv_vram]
    assert two["plan"]["kv"]["cells_device"] == two["tiers"]["size_device"] == cells
    assert two["plan"]["kv"]["cells_host"] == two["tiers"]["size_host"] == 1024 - cells
    assert two["tiers"]["bytes_host"] > 0 and two["tiers"]["steps_tiered"] > 0


def test_a_context_that_fits_has_one_memory(model: Path, rpc_device: str) -> None:
    answer = run(model, rpc_device, "--kv-vram", "8MiB")
    assert "tiers" not in answer and answer["plan"]["kv"]["cells_host"] == 0


def test_the_newest_tokens_on_the_device(model: Path, rpc_device: str) -> None:
    """One cell of 256 moves at a time: the border passes during the answer."""
    one = run(model, rpc_device, tokens=300)
    two = run(model, rpc_device, "--kv-vram", "400KiB", "--kv-policy", "recent", tokens=300)
    assert two["tokens"] == one["tokens"] and two["plan"]["tier_policy"] == "recent"
    assert two["tiers"]["bytes_moved"] > 0 and two["tiers"]["cells_host"] > 0


def test_a_saved_plan_keeps_its_tiers(model: Path, rpc_device: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    flags = ["-c", "1024", "-ngl", "all", "-fa", "on", "--kv-vram", "400KiB", "--kv-ram-type", "q8_0"]
    command = [sys.executable, "-m", "hybridgen_gguf", "plan", str(model), "--rpc", rpc_device, *flags, "--json"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    saved.write_text(made.stdout, encoding="utf-8")
    first = run(model, rpc_device, "--kv-vram", "400KiB", "--kv-ram-type", "q8_0")
    again = run(model, rpc_device, "--plan", str(saved))
    assert again["tokens"] == first["tokens"]
    for key in ("size_device", "size_host", "size_host_bytes", "bytes_host", "bytes_streamed"):
        assert again["tiers"][key] == first["tiers"][key], key


def test_the_border_follows_what_is_measured(model: Path, rpc_device: str) -> None:
    """Both ways are tried while the text stays the same; afterwards one of them is kept."""
    one = run(model, rpc_device, tokens=60)
    two = run(model, rpc_device, "--kv-vram", "400KiB", "--adapt-kv", tokens=60)
    still = run(model, rpc_device, "--kv-vram", "400KiB", tokens=60)
    assert two["tokens"] == one["tokens"]
    tried, usual = two["tiers"]["steps_streamed"], still["tiers"]["steps_streamed"]
    assert tried >= usual + 3, "three tokens went the other way"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kv-vram", "1MiB"], "no device"),
        (["--kv-ram-type", "q8_0"], "no device"),
        (["--kv-vram", "1MiB", "-nkvo"], "-nkvo"),
        (["--kv-vram", "1MiB", "-fa", "off"], "-fa off"),
        (["--kv-vram", "1MiB", "--kv-ram-type", "q9"], "q9"),
    ],
)
def test_what_cannot_be_is_named(model: Path, flags: list[str], named: str) -> None:
    command = [sys.executable, "-m", "hybridgen_gguf", "plan", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr
