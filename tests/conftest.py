"""Shared fixtures: the real engine, real models (fetched once, checked by digest), and a loopback RPC device."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from seed import FUZZING, SEED

from hybridgen_gguf.engine.handles import Model, start
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.model_file.shape import read_shape
from hybridgen_gguf.models.download import pull
from hybridgen_gguf.models.registry import resolve
from hybridgen_gguf.settings import ModelSettings
from hybridgen_gguf.vocabulary import Vocabulary

# Threads that spin while they wait make every other process slow; no test measures time. Read when the engine loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Who starts the tests in the background, or under nohup, has these signals ignored, and children would inherit that; a
# handler they do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(number, lambda *_: None)

# What a developer has profiled and tuned on this machine must not change the plans that tests see.
_OWN = tempfile.mkdtemp(prefix="hgguf-tests-")
atexit.register(shutil.rmtree, _OWN, ignore_errors=True)
os.environ["HGGUF_PROFILE"] = str(Path(_OWN) / "profile.json")
os.environ["HGGUF_DATA"] = _OWN

settings.register_profile("steady", derandomize=True)  # see seed.py
if not FUZZING:
    settings.load_profile("steady")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def engine() -> Library:
    """The patched engine. A missing or unpatched one is a failure, not a skip: scripts/setup builds it."""
    library = start()
    assert library.patched, "the tests need the engine that scripts/setup builds"
    return library


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return pull(resolve("smollm2-135m")).path


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270m, Q4_K_M: sliding windows, a large vocabulary, no chat template."""
    return pull(resolve("gemma3-270m")).path


@pytest.fixture(scope="session")
def tokenizer_smollm2(engine: Library, smollm2: Path) -> Iterator[Vocabulary]:
    """SmolLM2's vocabulary, for prompt.py."""
    shape = read_shape(smollm2)
    with Model(shape.file.path, ModelSettings(), vocab_only=True) as model:
        yield Vocabulary(shape, model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a byte vocabulary (tests/tinygguf.py)."""
    from tinygguf import build

    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    build(str(path))
    return path


@pytest.fixture(scope="session")
def rpc_device(engine: Library) -> Iterator[str]:
    """HOST:PORT of a server in a child process that offers the CPU as a device of its own."""
    with serving() as endpoint:
        yield endpoint


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of one device, for as long as it is needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    server = [sys.executable, str(ROOT / "tests" / "engine" / "rpc_server.py"), endpoint]
    process = subprocess.Popen(server, stdout=subprocess.DEVNULL)  # it reports every connection
    try:
        _wait_for(endpoint, process)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    host, port = endpoint.split(":")
    for _ in range(400):
        if process.poll() is not None:
            pytest.fail(f"the RPC server ended with code {process.returncode}")
        try:
            socket.create_connection((host, int(port)), 0.1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("the RPC server does not listen")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], None]:
    """Puts a file with a line of text below tmp_path, as a made-up /proc or /sys."""

    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    return put


def pytest_report_header() -> str:
    return f"HGGUF_TEST_SEED={SEED}"
