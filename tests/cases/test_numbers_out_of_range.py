"""Every option with a number, in every verb: odd values are refused by name, or the help says what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import call, refused

from hybridgen_gguf.cli import app as cli

Capture = pytest.CaptureFixture[str]
SIZES = ("vram", "ram", "kv_vram", "target_size")  # numbers with a unit
NUMBERS = {
    (verb, option.name): option
    for verb, command in cli.known_verbs().items()
    for option in command.params
    if option.param_type_name == "option"
    and (option.type_descriptor.annotation in (int, float) or option.name in (*SIZES, "n_gpu_layers", "tensor_split"))
}
#: below zero they mean something of their own, or are a number like any other
SIGNED = {"presence_penalty", "frequency_penalty"}
#: as many as there are, however large the number
UNBOUNDED = {
    *("predict", "reasoning_budget", "top_k", "repeat_last_n", "dry_penalty_last_n", "dry_allowed_length", "logprobs"),
    *("draws", "depth", "chunks", "temp", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("dry_base", "dynatemp_range", "dynatemp_exp", "top_nsigma", "tensor_split", "quality", "threads"),
}


def command(verb: str, tiny: Path, folder: Path) -> tuple[object, ...]:
    """The verb with little work; `pull`, `profile` and so on have no such options or begin nothing here."""
    (folder / "t.txt").write_text("The quick brown fox. " * 40, encoding="utf-8")
    (folder / "b.jsonl").write_text('{"custom_id": "1", "body": {"prompt": "hi", "max_tokens": 1}}', encoding="utf-8")
    (folder / "s.jsonl").write_text('{"custom_id": "1", "material": "hi"}', encoding="utf-8")
    return {
        "run": ("run", tiny, "--dry-run", "-p", "hi"),
        "plan": ("plan", tiny),
        "bench": ("bench", tiny, "-p", 2, "-n", 0),
        "quantize": ("quantize", tiny, folder / "o.gguf", "Q8_0", "--dry-run", "--text", folder / "t.txt"),
        "imatrix": ("imatrix", tiny, "-f", folder / "t.txt", "-o", folder / "i.gguf", "--chunks", 1),
        "tune": ("tune", folder / "none.gguf"),
        cli.BENCH_ATTENTION: (cli.BENCH_ATTENTION,),
        "profile": ("profile", "--show"),
        "batch": ("batch", tiny, folder / "b.jsonl", "-o", folder / "o.jsonl"),
        "score": ("score", tiny, folder / "s.jsonl", "-o", folder / "o.jsonl"),
    }[verb]


for verb, name in list(NUMBERS):
    if verb == "tune" and ("plan", name) in NUMBERS:  # the same flags, and what is taken would be measured
        del NUMBERS[verb, name]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "1e-400x", "99999999999999999999", "-1", "-99"])
@pytest.mark.parametrize(("verb", "name"), NUMBERS)
def test_odd_numbers(tiny: Path, tmp_path: Path, capsys: Capture, verb: str, name: str, value: str) -> None:
    option: Any = NUMBERS[verb, name]
    flag = max(option.opts, key=len)
    number = value.lstrip("-").isdigit()
    if number and value[0] != "-" and (name in UNBOUNDED or name in SIZES):
        return  # taken as it is, or more than there is: the tests of plans and samplers have these
    done = call(capsys, *command(verb, tiny, tmp_path), f"{flag}={value}")
    if value[0] == "-" and number and done.code in (0, 3):
        assert name in SIGNED or "-1" in option.help or "or less" in option.help, (flag, done)
        return
    assert done.code in (2, 3) if number else done.code == 2, (flag, done)
    if done.code == 2:
        refused(done, 2, "")
        assert any(word in done.err for word in (*option.opts, name, value)), done
