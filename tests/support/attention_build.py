"""Compiles tests/engine/attention_driver.cpp with the attention kernels alone, for any instruction set.

The kernels' sources come from patches/, the headers from the pinned engine sources that scripts/setup leaves in the
cache. Invariant: nothing outside `folder` is written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hybridgen_gguf.make.convert import converter_folder

ROOT = Path(__file__).resolve().parents[2]
_HEADERS = ("ggml/include", "ggml/src", "ggml/src/ggml-cpu")
_TAKEN = (*(f"{folder}/*.h" for folder in _HEADERS), "ggml/src/ggml-cpu/hg-attention*")


def kernel_sources(folder: Path) -> Path:
    """Writes the patched headers and the kernels, and nothing else, into `folder`."""
    pinned = converter_folder()
    for name in _HEADERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for header in (pinned / name).glob("*.h"):
            shutil.copy(header, folder / name)
    series = (ROOT / "patches" / "series").read_text(encoding="utf-8").splitlines()
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for name in (line.strip() for line in series if line.strip() and not line.startswith("#")):
        only = [f"--include={pattern}" for pattern in _TAKEN]
        command = ["git", "apply", "--whitespace=nowarn", *only, str(ROOT / "patches" / name)]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


def compile_driver(compiler: str, flags: list[str], folder: Path) -> Path:
    """The driver as a program in `folder`. Fails the test with the compiler's words when it does not compile."""
    sources = kernel_sources(folder / "source")
    program = folder / "attention_driver"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-unused-function", *flags]
    command += [f"-I{sources / name}" for name in _HEADERS]
    command += [str(ROOT / "tests/engine/attention_driver.cpp"), str(sources / "ggml/src/ggml-cpu/hg-attention.cpp")]
    done = subprocess.run([*command, "-pthread", "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run_driver(program: Path, seed: int, cases: int, runner: list[str] | None = None) -> str:
    """What the driver prints; a failure carries the case and its seed."""
    command = [*(runner or []), str(program), str(seed), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cross_tools() -> tuple[str, list[str]] | None:
    """The aarch64 cross compiler and how to run what it makes, when both are installed."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    return (compiler, [emulator, "-L", "/usr/aarch64-linux-gnu"]) if compiler and emulator else None
