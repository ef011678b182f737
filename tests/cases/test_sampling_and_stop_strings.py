"""Sampling switches, seeds, half characters and stop strings, as `run` shows them (D-20 to D-23)."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call, refused, spawn

Capture = pytest.CaptureFixture[str]
WHOLE = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--temp", 1)


def written(capsys: Capture, model: Path, *arguments: object) -> str:
    done = call(capsys, "run", model, "-p", "Once", "-n", 8, "--ignore-eos", *arguments)
    assert done.code == 0, done
    return done.out


def test_sampler_off_values(tiny: Path, capsys: Capture) -> None:
    assert len({written(capsys, tiny, *WHOLE, "-s", seed) for seed in range(4)}) == 4
    everything = [written(capsys, tiny, *WHOLE, "--top-k", k, "-s", 5) for k in (0, -1, 260, 1 << 40)]
    assert len(set(everything)) == 1
    assert written(capsys, tiny, "--top-k", 1, "-s", 1) == written(capsys, tiny, "--temp", 0, "-s", 2)


@pytest.mark.parametrize(
    "flags",
    [
        ("--temp", "nan"), ("--temp", "inf"), ("--top-p", "2"), ("--top-p", "-0.5"), ("--min-p", "5"),
        ("--repeat-penalty", "0"), ("--repeat-last-n", "-2"), ("--logit-bias", "5"), ("--logit-bias", "5+nan"),
        ("--logit-bias", "999999+1"), ("--logit-bias", "-5+1"), ("--samplers", "foo"), ("--logprobs", "-1"),
        ("--dry-multiplier", "nan"), ("--top-k", "1.5"), ("--draws", "-1"), ("--logit-bias", "5+1e39"),
        ("--presence-penalty", "1e39"), ("--temp", "1e400"), ("--top-k", "-9223372036854775809"),
    ],
)  # fmt: skip
def test_d20_values_out_of_range_are_named(tiny: Path, capsys: Capture, flags: tuple[str, str]) -> None:
    done = call(capsys, "run", tiny, "-p", "Once", "-n", 2, *flags)
    refused(done, 2, flags[0])


@pytest.mark.parametrize(
    "flags",
    [
        ("--dry-multiplier", "1e30", "--dry-base", "1e30", "--dry-allowed-length", "1"),
        ("--frequency-penalty", "1e30"), ("--frequency-penalty", "-1e30"), ("--repeat-penalty", "1e30"),
        ("--temp", "5e-324"), ("--top-p", "1e-300"), ("--dynatemp-range", "1e30"), ("--logit-bias", "200-1e30"),
    ],
)  # fmt: skip
def test_d20_values_at_the_edge_of_what_numbers_hold(tiny: Path, capsys: Capture, flags: tuple[str, ...]) -> None:
    """Warnings are errors in tests, so an overflow would be one."""
    done = call(capsys, "run", tiny, "-p", "hihihihihihihi", "-n", 12, "--ignore-eos", "-q", *flags)
    assert (done.code, done.err) == (0, "")


def test_d21_no_seed_is_random_and_reported(tiny: Path, capsys: Capture) -> None:
    plain = [call(capsys, "run", tiny, "-p", "Once", "-n", 12, "--json", *WHOLE).json for _ in range(2)]
    minus = call(capsys, "run", tiny, "-p", "Once", "-n", 12, "--json", *WHOLE, "-s", -1).json
    seeds = {reply["seed"] for reply in (*plain, minus)}
    assert len(seeds) == 3 and all(0 <= seed < 1 << 32 for seed in seeds)
    again = call(capsys, "run", tiny, "-p", "Once", "-n", 12, "--json", *WHOLE, "-s", plain[0]["seed"]).json
    assert again["tokens"] == plain[0]["tokens"] != plain[1]["tokens"]
    assert f"seed {plain[0]['seed']}" in call(capsys, "run", tiny, "-p", "x", "-n", 1, "-s", plain[0]["seed"]).err


def test_d21_zero_is_a_seed(tiny: Path, capsys: Capture) -> None:
    assert written(capsys, tiny, *WHOLE, "--seed", 0) == written(capsys, tiny, *WHOLE, "--seed", 0)
    assert written(capsys, tiny, *WHOLE, "--seed", 0) != written(capsys, tiny, *WHOLE, "--seed", (1 << 32) - 1)
    for wrong in (1 << 32, -2, 10**30, "abc", "1.5", ""):
        refused(call(capsys, "run", tiny, "-p", "x", "-n", 1, "--seed", wrong), 2, "seed")


@pytest.mark.parametrize("seed", range(6))
def test_d22_streamed_text_is_the_whole_text(tiny: Path, capsys: Capture, seed: int) -> None:
    flags = ("-n", 40, "--ignore-eos", "--temp", 1, "-s", seed)
    streamed = call(capsys, "run", tiny, "-p", "hi", *flags).out
    text = call(capsys, "run", tiny, "-p", "hi", *flags, "--json").json["text"]
    assert streamed == text + "\n" * (not text.endswith("\n"))


def test_d22_a_pipe_gets_the_same_bytes(tiny: Path, capsys: Capture) -> None:
    flags = ("-n", 40, "--ignore-eos", "--temp", 1, "-s", 3)
    for locale in ({"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}):
        assert spawn("run", tiny, "-p", "hi", *flags, **locale).out == call(capsys, "run", tiny, "-p", "hi", *flags).out


def test_d22_real_text(smollm2: Path, capsys: Capture) -> None:
    flags = ("-p", "Repeat: 😀🇫🇷👩\u200d👩\u200d👧 漢字", "-n", 24, "--temp", 0)
    text = call(capsys, "run", smollm2, *flags, "--json").json["text"]
    assert call(capsys, "run", smollm2, *flags).out.rstrip("\n") == text.rstrip("\n")
    emoji = next(char for char in text if ord(char) > 0xFFFF)  # D-23: a stop of four bytes, split over tokens
    stopped = call(capsys, "run", smollm2, *flags, "--stop", emoji, "--json").json
    assert (stopped["text"], stopped["finish_reason"]) == (text.partition(emoji)[0], "stop")


COUNT = ("--raw", "-p", "Count: 1 2 3 4 5 6 7 8 9 10\nCount: 1 2 3 4", "--temp", 0, "-n", 16)


def test_d23_stop_strings(smollm2: Path, capsys: Capture) -> None:
    whole = call(capsys, "run", smollm2, *COUNT).out
    assert whole.startswith(" 5 6 7 8 9 10")
    for stops, kept in ((("6 7",), " 5 "), (("8", "6"), " 5 "), (("6", "8"), " 5 "), ((" 9 1", "9 10"), " 5 6 7 8")):
        flags = [word for stop in stops for word in ("--stop", stop)]
        reply = call(capsys, "run", smollm2, *COUNT, *flags, "--json").json
        assert (reply["text"], reply["finish_reason"]) == (kept, "stop")
    assert call(capsys, "run", smollm2, *COUNT, *flags).out == kept + "\n"


def test_d23_many_and_unmet_stops(smollm2: Path, capsys: Capture) -> None:
    many = [word for index in range(1000) for word in ("--stop", f"{index:04d}" * 25)]
    whole = call(capsys, "run", smollm2, *COUNT).out
    assert call(capsys, "run", smollm2, *COUNT, *many).out == whole
    assert call(capsys, "run", smollm2, *COUNT, "--stop", " 5 6 8").out == whole
    refused(call(capsys, "run", smollm2, *COUNT, "--stop", "x", "--stop", ""), 2, "stop string")
