"""A run with the output layer on a second device: the device's candidates give the tokens that all logits give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    "flags", [["--temp", "0.9"], ["--temp", "0"], ["--temp", "1", "--top-k", "20", "--logprobs", "2"]]
)
def test_candidates_from_the_device_give_the_same_answer(smollm2: Path, rpc_device: str, flags: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "hybridgen_gguf",
        "run",
        str(smollm2),
        "-p",
        "Name three rivers.",
        "-n",
        "16",
        "--json",
    ]
    command += ["-c", "512", "-ngl", "all", "--rpc", rpc_device, "--seed", "7", *flags]
    answers = []
    for choice in ("on", "off"):
        environment = {**os.environ, "HGGUF_DEVICE_SAMPLER": choice}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    on, off = answers
    assert on["plan"]["n_gpu_layers"] == 31
    assert on["tokens"] == off["tokens"]
    for with_device, without in zip(on.get("logprobs", ()), off.get("logprobs", ()), strict=True):
        assert with_device["logprob"] == pytest.approx(without["logprob"], abs=1e-4)
