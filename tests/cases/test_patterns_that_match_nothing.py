"""-ot, -ncmoe, -ts and -mg that change nothing for this model on this machine are named once; --strict refuses them.

Case A-05.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call
from tinygguf import build

Capture = pytest.CaptureFixture[str]
RUN = ("-n", 1, "-p", "x", "-c", 256)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("experts") / "model.gguf", experts=4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-ot", "nosuch=CPU"), ["-ot nosuch has no effect: it matches no tensor"]),
        (("-ncmoe", 99), ["-ncmoe (pattern blk", "ffn_(up|down|gate|gate_up)_(ch|)exps) has no effect"]),
        (("-ot", "nosuch=CPU", "-ncmoe", 99), ["-ot nosuch", "-ncmoe (pattern"]),
        (("-ts", "3,1", "-dev", "none"), ["-ts 3,1 has no effect: no device is used"]),
        (("-mg", 1, "-dev", "none"), ["-mg 1 has no effect: no device is used"]),
    ],
    ids=["ot", "ncmoe", "both", "ts", "mg"],
)
def test_named_once_in_plan_and_run(
    tiny: Path, capsys: Capture, arguments: tuple[object, ...], named: list[str]
) -> None:
    plan, run = call(capsys, "plan", tiny, "--json", *arguments), call(capsys, "run", tiny, *RUN, *arguments)
    assert plan.code == run.code == 0
    for text in named:
        assert plan.err.count(text) == run.err.count(text) == 1, (text, plan.err, run.err)
        assert sum(text in warning for warning in plan.json["plan"]["warnings"]) == 1
    strict = call(capsys, "run", tiny, *RUN, *arguments, "--strict")
    assert strict.code == 2 and f"error: {named[0]}" in strict.err and "--strict" in strict.err
    assert strict.out == ""


@pytest.mark.parametrize("arguments", [("-ot", "ffn_up=CPU"), ("-ncmoe", 99), ("-ncmoe", 1), ("-ot", "exps=CPU")])
def test_what_matches_is_not_named(experts: Path, capsys: Capture, arguments: tuple[object, ...]) -> None:
    done = call(capsys, "plan", experts, "--json", "--strict", *arguments)
    assert done.code == 0 and "no effect" not in done.err


def test_no_memory_of_devices_means_the_cpu(tiny: Path, capsys: Capture) -> None:
    done = call(capsys, "plan", tiny, "--vram", 0, "--json")
    assert done.code == 0 and done.json["plan"]["n_gpu_layers"] == 0
    assert {use["device"] for use in done.json["plan"]["placement"] if use["total"]} == {"CPU"}
    assert call(capsys, "plan", tiny, "--vram", 0, "-ngl", 2).code == 3
