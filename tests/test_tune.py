"""The search for settings against a simulated machine; what is remembered, and how it is put to use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from planned import dense, machine

from hybridgen_gguf import tuned
from hybridgen_gguf.plan import Limits
from hybridgen_gguf.tune.search import Sample, axes_of, search
from hybridgen_gguf.tuned import Setting, Tuned

START = Setting(4, 4, 2048, 512, "auto", "f16", "f16")


class Simulated:
    """Speeds by formula: 6 threads are best for writing, 8 for reading, batches of 1024, and q8_0 saves a tenth."""

    def __init__(self, noise: float = 0.0, divergence: float = 0.001, measurements: int = 1000) -> None:
        self.random, self.noise = random.Random(1), noise
        self.divergence, self.left = divergence, measurements
        self.measured = 0

    def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample:
        self.left -= 1
        self.measured += 1
        error = 1 + self.noise * self.random.uniform(-1, 1)
        write = 0.02 * (1 + 0.05 * abs(setting.threads - 6)) * (0.9 if setting.type_k == "q8_0" else 1.0)
        read = 0.004 * (1 + 0.03 * (8 - setting.threads_batch)) * (1 + abs(setting.n_ubatch - 1024) / 4096)
        if setting.flash_attention == "off":
            write, read = write * 1.3, read * 1.3
        return Sample(write * error, read * error, 0.0, self.divergence if setting.type_k != "f16" else None)

    def seconds_left(self) -> float:
        return float(self.left)


def found(meter: Simulated, limits: Limits | None = None) -> Setting:
    axes = axes_of(limits or Limits(), 8, ("f16", "q8_0"))
    return search(meter, START, axes, "mixed", 512).best.setting


@pytest.mark.parametrize("noise", [0.0, 0.004])
def test_finds_the_best(noise: float) -> None:
    assert found(Simulated(noise)) == Setting(6, 8, 2048, 1024, "auto", "q8_0", "q8_0")


def test_a_cache_type_that_changes_the_text_is_not_taken() -> None:
    assert found(Simulated(divergence=0.5)).type_k == "f16"


def test_what_the_user_fixed_stays() -> None:
    setting = found(Simulated(), Limits(threads=4, type_k="q8_0", n_ubatch=512))
    assert (setting.threads, setting.threads_batch, setting.n_ubatch, setting.type_k) == (4, 4, 512, "f16")


def test_noise_alone_gains_nothing() -> None:
    class Flat(Simulated):
        def measure(self, setting: Setting, decode: bool, prompt: bool) -> Sample:
            error = 1 + 0.1 * self.random.uniform(-1, 1)
            return Sample(0.02 * error, 0.004 * error)

    results = [search(Flat(), START, axes_of(Limits(), 8, ("f16",)), "decode", 512) for _ in range(3)]
    assert all(result.seconds(result.best) <= 1.15 * result.seconds(result.start) for result in results)


def test_ends_when_time_is_up() -> None:
    meter = Simulated(measurements=6)
    result = search(meter, START, axes_of(Limits(), 8, ("f16",)), "mixed", 512)
    assert result.stopped == "time was up"
    assert meter.measured <= 6 + 5  # and the last comparison


def test_remembered_and_recalled(tmp_path: Path) -> None:
    path = tmp_path / "ordner 文件" / "tuned.json"
    entry = Tuned(START, 51.5, 210.0, "mixed", 512, "2026-11-29T12:00:00+00:00")
    tuned.remember("a", entry, path)
    tuned.remember("b", replace(entry, decode_tps=1.0), path)
    assert tuned.recall("a", path) == entry
    assert tuned.recall("c", path) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"setting": {}}}', '{"a": {"setting": null}}'])
def test_a_damaged_file_is_no_entry(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text, encoding="utf-8")
    assert tuned.recall("a", path) is None


def test_filled_leaves_what_the_user_fixed() -> None:
    best = Setting(6, 8, 2048, 1024, "on", "q8_0", "q8_0")
    assert tuned.filled(Limits(), best) == Limits(
        threads=6, threads_batch=8, n_batch=2048, n_ubatch=1024, flash_attention="on", type_k="q8_0", type_v="q8_0"
    )
    kept = tuned.filled(Limits(threads=2, n_batch=256, type_k="q4_0"), best)
    assert kept == Limits(threads=2, n_batch=256, type_k="q4_0")


def test_nothing_is_read_when_nothing_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGGUF_DATA", str(tmp_path))
    shape = dense(2, 256, 512, 4, 2, 1000)
    assert tuned.with_tuned(Limits(), machine(4, 40, 8), shape) == (Limits(), None)
