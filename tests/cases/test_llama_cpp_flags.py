"""Commands copied from llama.cpp's guides: each flag works, changes nothing, or is answered by its name (A-09)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import call, refused

from hybridgen_gguf.cli.app import known_verbs
from hybridgen_gguf.cli.arguments import unescaped
from hybridgen_gguf.cli.llama_flags import answer_to, is_taken
from hybridgen_gguf.make.convert import converter_folder

Capture = pytest.CaptureFixture[str]
RUN = ("--raw", "-p", "hi", "-n", 1, "-c", 256)


def llama_flags() -> list[str]:
    """Every flag in the pinned llama.cpp's common/arg.cpp."""
    source = (converter_folder() / "common" / "arg.cpp").read_text(encoding="utf-8")
    found: list[str] = []
    for block in source.split("common_arg(")[1:]:
        names = re.match(r"\s*\{([^}]*)\}\s*(?:,\s*\{([^}]*)\})?", block)
        found += re.findall(r'"(-[^"]+)"', (names[1] + (names[2] or "")) if names else "")
    return found


def ours() -> set[str]:
    return {name for p in known_verbs()["run"].params for name in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}


def test_every_flag_of_llama_cpp_is_ours_or_answered() -> None:
    flags = llama_flags()
    assert len(flags) > 500
    own = ours() | {"--version"}
    assert [flag for flag in flags if flag not in own and not is_taken(flag) and answer_to(flag) is None] == []


@pytest.mark.parametrize("flag", ["-mm", "--control-vector", "-i", "-gan", "-fitt", "-np", "--spm-infill", "-bs"])
def test_what_is_not_there_is_named(tiny: Path, capsys: Capture, flag: str) -> None:
    done = call(capsys, "run", tiny, *RUN, flag, "x")
    refused(done, 2, f"{flag} is a flag of llama.cpp that hgguf does not have")
    assert "hint: " in done.err and done.out == ""


@pytest.mark.parametrize(
    "flags",
    [
        ("-no-cnv",), ("-cnv",), ("-st",), ("-fit", "off"), ("-fit", "on"), ("-lm", "mlock"), ("-lm", "none"),
        ("--no-warmup",), ("--color",), ("--log-disable",), ("--no-perf",), ("-lv", "3"), ("--poll=50",),
        ("--offline",), ("--warmup",), ("--keep", "-1"), ("--no-escape",),
    ],
)  # fmt: skip
def test_what_works_or_changes_nothing(tiny: Path, capsys: Capture, flags: tuple[str, ...]) -> None:
    plain = call(capsys, "run", tiny, *RUN, "-s", 1, "--json").json["text"]
    done = call(capsys, "run", tiny, *RUN, "-s", 1, "--json", *flags)
    assert done.code == 0 and done.json["text"] == plain


def test_experts_on_the_cpu(tiny: Path, capsys: Capture) -> None:
    assert "matches no tensor" in call(capsys, "plan", tiny, "-cmoe").err


def test_a_value_that_looks_like_a_flag_stays_a_value(tiny: Path, capsys: Capture) -> None:
    assert call(capsys, "run", tiny, "--raw", "-n", 1, "-c", 256, "-p", "--lora").code == 0
    assert call(capsys, "run", tiny, *RUN, "--stop", "-cnv").code == 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (r"a\nb\tc", "a\nb\tc"), (r"\\n", r"\n"), (r"\'\"", "'\""), (r"\x41\x4", r"A\x4"), (r"\q\0", r"\q\0"),
        (r"\xe4\xb8\xad", "中"), ("中\\n", "中\n"), ("\\", "\\"), (r"\xff", "\ufffd"),
    ],
)  # fmt: skip
def test_escapes_are_llama_cpps(text: str, meant: str) -> None:
    assert unescaped(text) == meant


def test_escapes_are_processed_where_asked(tiny: Path, capsys: Capture) -> None:
    run = ("run", tiny, "--raw", "-n", 1, "-c", 256, "-s", 1, "--json")
    counts = [
        call(capsys, *run, "-p", text, *more).json["usage"]["prompt_tokens"]
        for text, more in (
            (r"a\nb", ()),
            (r"a\nb", ("-e",)),
            ("a\nb", ("--no-escape",)),
            (r"a\nb", ("-e", "--no-escape")),
        )
    ]
    assert counts[0] == counts[3] == counts[1] + 1 and counts[1] == counts[2]


def test_wrong_modes_are_named(tiny: Path, capsys: Capture) -> None:
    refused(call(capsys, "run", tiny, *RUN, "-lm", "dio"), 2, "-lm dio is not known")
    refused(call(capsys, "run", tiny, *RUN, "-fit"), 2, "-fit is not known")


def test_variables_that_are_not_read_are_mentioned(tiny: Path, capsys: Capture) -> None:
    done = call(capsys, "run", tiny, *RUN, LLAMA_ARG_CPU_MOE="1", LLAMA_ARG_N_CPU_MOE="", LLAMA_ARG_TOP_K="1")
    told = [line for line in done.err.splitlines() if "LLAMA_ARG" in line]
    assert done.code == 0 and told == ["warning: LLAMA_ARG_CPU_MOE is set, and hgguf does not read it"]
