"""KV in two memories when memory cannot be had: every allocation fails once, over RPC; nothing pinned; small pages."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tinygguf import build

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "alloc_faults.so"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "alloc_faults.c")]
    subprocess.run([*command, "-ldl"], check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiers") / "tiny.gguf", embd=256, heads=4, kv=2, layers=3, ctx=1024)


def call(shim: Path, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(shim)}
    return subprocess.run(
        [sys.executable, *command], env=inherited | environment, capture_output=True, text=True, timeout=300
    )


def child(shim: Path, endpoint: str, model: Path, what: str, prefetch: str = "on") -> Any:
    command = [str(HERE / "tiers_faults_child.py"), endpoint, str(model), what]
    done = call(shim, command, HGGUF_KV_PREFETCH=prefetch)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("prefetch", "dispensable"), [("off", 1), ("on", 3)])
def test_every_allocation_may_fail(shim: Path, rpc_device: str, model: Path, prefetch: str, dispensable: int) -> None:
    """An error with exit code 3, or the same text another way; and the next attempt is whole again."""
    found = child(shim, rpc_device, model, "all", prefetch)
    plain = found["plain"]
    assert plain["pinned"] and plain["tiered"] > 0 and plain["told"] == []
    assert found["allocations"] >= 8, "weights, KV, host cells, their registration, compute and output buffers"
    assert found["after"] == plain and found["left_registered"] == 0
    fallbacks = [one for one in found["nth"] if "error" not in one]
    assert all(one["exit_code"] == 3 for one in found["nth"] if "error" in one), found["nth"]
    assert len(fallbacks) == dispensable, "registering, and room to copy ahead (twice: a sampler is attached)"
    assert all(one["tokens"] == plain["tokens"] for one in fallbacks)
    assert "refused to register" in fallbacks[0]["told"][0]
    assert any("host cells" in one.get("error", "") for one in found["nth"])


@pytest.mark.parametrize(
    ("what", "told", "key"), [("pages", "2 MiB pages", "huge_pages"), ("pinned", "refused to register", "pinned")]
)
def test_plain_memory_does_and_is_told(
    shim: Path, rpc_device: str, model: Path, what: str, told: str, key: str
) -> None:
    plain = child(shim, rpc_device, model, what)["plain"]
    assert told in plain["told"][0] and not plain[key] and len(plain["tokens"]) == 8


@pytest.mark.parametrize("at", [1, 4, 7, 10])
def test_the_command_line_says_it_in_two_lines(shim: Path, rpc_device: str, model: Path, at: int) -> None:
    command = ["-m", "hybridgen_gguf", "run", str(model), "--raw", "-p", "the fox and the crow " * 14, "-n", "4"]
    command += ["-c", "1024", "-ngl", "all", "-fa", "on", "--kv-vram", "400KiB", "--rpc", rpc_device]
    done = call(shim, command, ALLOC_FAULT_AT=str(at))
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]


def test_too_little_memory_is_said(rpc_device: str, model: Path) -> None:
    """A context whose host cells no machine has: the plan refuses it before anything is allocated."""
    command = ["-m", "hybridgen_gguf", "run", str(model), "--raw", "-p", "x", "-n", "4", "-c", str(1 << 30)]
    command += ["-ngl", "all", "-fa", "on", "--kv-vram", "400KiB", "--rpc", rpc_device]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "would fit" in done.stderr and "Traceback" not in done.stderr


def test_a_device_that_refuses(model: Path) -> None:
    """A server that may take 1.5 GB of address space is asked for more, for the KV and for scratch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "engine" / "rpc_server.py"), endpoint],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29)),
    )
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", int(endpoint.split(":")[1])), 0.2).close()
                break
            except OSError:
                assert server.poll() is None, "the server cannot start under its limit"
                time.sleep(0.1)
        for kv_vram in ("400KiB", "100GiB"):
            command = ["-m", "hybridgen_gguf", "run", str(model), "--raw", "-p", "x", "-n", "4", "-c", str(1 << 20)]
            command += ["-ngl", "all", "-fa", "on", "--kv-vram", kv_vram, "--rpc", endpoint]
            done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
            assert done.returncode == 3, done.stderr
            assert "allocate" in done.stderr and "Traceback" not in done.stderr
    finally:
        server.kill()
        server.wait()
