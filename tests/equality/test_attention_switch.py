"""`cpu-attention`: `stock` is the stock code bit for bit, and both paths mean the same to a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_cases import Case, inputs, replace, run
from attention_quality import compare, widened
from numpy.typing import NDArray

from hybridgen_gguf.engine.library import Library

ROOT = Path(__file__).resolve().parent.parent.parent
PATCH = ROOT / "patches" / "0002-cpu-attention.patch"
#: what the patch may replace in upstream's files: the planned work size, the empty table of switches
REPLACED = {
    "cur += MAX(prefill, decode);",
    "HG_SWITCH_NONE = -1, // no patch of this build has a switch yet",
    "nullptr,",
}
COMPUTE = """
import sys, warnings
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/support"]
warnings.simplefilter("ignore")
import numpy as np
from attention_cases import Case, inputs
from hybridgen_gguf.engine.graphs.attention import Attention, AttentionGraph
out = []
for type_k, tokens, cells in (("f16", 1, 700), ("q8_0", 1, 300), ("f32", 40, 200), ("bf16", 3, 90)):
    given = inputs(Case(type_k, type_k, cells, tokens, causal=True, seed=5))
    with AttentionGraph(given.q, given.k, given.v, given.mask, how=Attention(type_k, type_k)) as graph:
        graph.compute(2)
        out.append(graph.output().ravel())
np.save(sys.argv[2], np.concatenate(out))
"""


def _in_child(folder: Path, path: str, to: Path) -> NDArray[np.float32]:
    environment = {**os.environ, "HGGUF_ENGINE": str(folder), "HGGUF_CPU_ATTENTION": path}
    subprocess.run([sys.executable, "-c", COMPUTE, str(ROOT), str(to)], env=environment, check=True)
    found: NDArray[np.float32] = np.load(to)
    return found


@pytest.mark.skipif(
    not os.environ.get("HGGUF_STOCK_ENGINE"),
    reason="HGGUF_STOCK_ENGINE is not set: it names a folder with the unpatched engine, a build of its own",
)
def test_stock_equals_the_unpatched_library(engine: Library, tmp_path: Path) -> None:
    unpatched = _in_child(Path(os.environ["HGGUF_STOCK_ENGINE"]), "stock", tmp_path / "a.npy")
    assert np.array_equal(_in_child(engine.folder, "stock", tmp_path / "b.npy"), unpatched)
    assert not np.array_equal(_in_child(engine.folder, "fast", tmp_path / "c.npy"), unpatched)


def test_the_environment_switches(engine: Library, tmp_path: Path) -> None:
    stock = _in_child(engine.folder, "stock", tmp_path / "a.npy")
    fast = _in_child(engine.folder, "fast", tmp_path / "b.npy")
    assert not np.array_equal(stock, fast)
    assert np.allclose(stock, fast, atol=0.02)


def test_the_patch_changes_no_stock_code() -> None:
    """In files that were there before, lines are added; the only ones replaced are those listed above."""
    old, removed = True, set()
    for line in PATCH.read_text(encoding="utf-8").splitlines():
        if line.startswith("--- "):
            old = line != "--- /dev/null"
        elif old and line.startswith("-") and line != "---":
            removed.add(line[1:].strip())
    assert removed <= REPLACED


def test_the_switch_works_within_a_process() -> None:
    case = Case("q8_0", "q8_0", cells=300, seed=3)
    given = inputs(case)
    result = run(case, given)
    assert not np.array_equal(result.fast, result.stock)
    again = run(replace(case, threads=1), given)
    assert np.array_equal(again.stock, result.stock)  # stock's split of heads does not change its sums


def test_perplexity_of_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    """Within 0.1 %, over 1,024 tokens here; scripts/dev/check_perplexity does 20,000."""
    model = widened(smollm2, tmp_path)
    found = compare(model, 1024, 512, threads=2)
    model.unlink()  # half a gigabyte
    assert abs(found.change) < 1e-3
    assert found.kl < 1e-4
    assert found.same_choice > 0.99
