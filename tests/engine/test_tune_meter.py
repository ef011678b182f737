"""What `tune` measures on the real engine, beside time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.loader import prepare
from hybridgen_gguf.plan import Limits
from hybridgen_gguf.tune.meter import EngineMeter
from hybridgen_gguf.tune.search import QUALITY_LIMIT, start_of


@pytest.mark.parametrize("cut", [False, True])
def test_another_cache_type_is_compared_after_the_same_text(engine: Library, smollm2: Path, cut: bool) -> None:
    """Also when the text was cut after the start was measured, because something in between read it slowly."""
    prepared = prepare(smollm2, Limits(n_ctx=1024))
    start = start_of(prepared.plan)
    with closing(EngineMeter(prepared, 60.0, 160)) as meter:
        assert meter.measure(start, decode=True, prompt=False).divergence is None
        if cut:
            meter._shorten(1000.0, meter.depth)
            assert meter.depth == 128
        finer = meter.measure(replace(start, type_k="q8_0", type_v="q8_0"), decode=True, prompt=False).divergence
        coarser = meter.measure(replace(start, type_k="q4_0", type_v="q4_0"), decode=True, prompt=False).divergence
    assert finer is not None and coarser is not None
    assert 0 < finer < QUALITY_LIMIT < coarser
