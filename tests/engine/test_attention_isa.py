"""The attention kernels for instruction sets other than this machine's engine was built for."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from attention_build import compile_driver, cross_tools, run_driver
from seed import SEED

X86 = platform.machine() in ("x86_64", "AMD64")


def test_portable_code(tmp_path: Path) -> None:
    flags = ["-march=x86-64"] if X86 else ["-DHG_PORTABLE"]
    program = compile_driver("c++", flags, tmp_path)
    assert run_driver(program, SEED, 100).startswith("portable")


@pytest.mark.skipif(not X86, reason="AVX2 code runs on x86-64 alone")
def test_avx2(tmp_path: Path) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX2")
    program = compile_driver("c++", ["-mavx2", "-mfma", "-mf16c"], tmp_path)
    assert run_driver(program, SEED, 200).startswith("avx2")


@pytest.mark.skipif(
    cross_tools() is None, reason="needs g++-aarch64-linux-gnu and qemu-user, which continuous integration installs"
)
def test_neon_under_an_emulator(tmp_path: Path) -> None:
    tools = cross_tools()
    assert tools is not None
    compiler, emulator = tools
    program = compile_driver(compiler, [], tmp_path)
    assert run_driver(program, SEED, 40, emulator).startswith("neon")
