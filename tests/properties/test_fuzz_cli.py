"""Random values for flags, files of settings and chat templates: an answer or one plain error, quickly, always.

HGGUF_FUZZ_EXAMPLES sets how many of each are tried (scripts/dev/fuzz: many).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from command_line import Done, call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridgen_gguf.cli import app as cli

# The command line prints what Python warns of; here it would be an error.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EXAMPLES = int(os.environ.get("HGGUF_FUZZ_EXAMPLES", "40"))
SLOWEST = 10.0  # seconds
bounded = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)

# What a command that opens a model may be given. -n keeps answers short; --rpc would open connections.
LEFT_OUT = {"help", "json", "prompt", "file", "predict", "rpc", "numa", "mlock", "model_flag", "verbose", "jinja"}
FLAGS = {
    verb: [
        (max(parameter.opts, key=len), parameter.is_flag)
        for parameter in cli.known_verbs()[verb].params
        if parameter.param_type_name == "option" and parameter.name not in LEFT_OUT
    ]
    for verb in ("run", "plan", "bench", "quantize", "imatrix", "convert", "validate", "inspect")
}
NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-3, 300),
    st.floats(width=64),
    st.sampled_from([0, 1, -1, 256, 2**31, 2**32]),
)
WORDS = st.one_of(
    NUMBERS.map(str),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    st.sampled_from(
        [
            *("", "-", "--", "auto", "all", "none", "q8_0", "f16", "CPU", "CPU,CPU", "1GiB", "nan", "inf", "1e999"),
            *("a=CPU", ".*=CPU", "[=CPU", "(?:=CPU", "chatml", "top_k;temperature", "5+1", "1-inf", "é漢😀"),
            *("\x1b[2J", "/dev/null", "/", "on", "off", "row", "1,2"),
        ]
    ),
)


def flags(verb: str) -> st.SearchStrategy[list[str]]:
    def written(pair: tuple[tuple[str, bool], str]) -> list[str]:
        (name, switch), value = pair
        return [name] if switch else [f"{name}={value}"]

    one = st.tuples(st.sampled_from(FLAGS[verb]), WORDS).map(written)
    return st.lists(one, min_size=1, max_size=3).map(lambda parts: [word for part in parts for word in part])


def plain(done: Done, seconds: float) -> None:
    """An answer, or one error of ours; nothing else."""
    assert done.code in (0, 1, 2, 3, 4), done
    assert "Traceback" not in done.err and "internal error" not in done.err and "crashed" not in done.err, done
    assert "\x1b" not in done.err
    if done.code:
        lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
        assert lines[0].startswith("error: ") and len(lines) <= 2, done
    assert seconds < SLOWEST, done


def tried(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    start = time.monotonic()
    done = call(capsys, *arguments)
    plain(done, time.monotonic() - start)
    return done


@bounded
@given(words=flags("plan"))
def test_plan_flags(tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    tried(capsys, "plan", tiny, *words)


@bounded
@given(words=flags("run"))
def test_run_flags(tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    tried(capsys, "run", tiny, "-p", "hi", "-n", 2, *words)


@pytest.mark.parametrize("verb", ["bench", "quantize", "imatrix", "convert", "validate", "inspect"])
@settings(bounded, max_examples=max(EXAMPLES // 2, 1))
@given(data=st.data())
def test_flags_of_other_verbs(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, data: st.DataObject
) -> None:
    """Behind the flags stand those that keep the work small; what is written must be whole or absent."""
    (tmp_path / "t.txt").write_text("The quick brown fox. " * 40, encoding="utf-8")
    (tmp_path / "hf").mkdir(exist_ok=True)
    out = tmp_path / "o.gguf"
    out.unlink(missing_ok=True)
    words = data.draw(flags(verb))
    before = {
        "quantize": (tiny, out, "Q8_0"),
        "imatrix": (tiny, "-f", tmp_path / "t.txt", "-o", out),
        "convert": (tmp_path / "hf", out),
    }.get(verb, (tiny,))
    after = {
        "bench": ("-p", 4, "-n", 1, "-d", 0, "-r", 1),
        "imatrix": ("--chunk", 64, "--chunks", 1, "-o", out, "-f", tmp_path / "t.txt"),
    }.get(verb, ())
    done = tried(capsys, verb, *before, *words, *after)
    assert not list(tmp_path.glob(".hgguf-*")), done
    if out.exists():
        assert out.read_bytes()[:4] == b"GGUF" and done.code == 0, done


@bounded
@given(words=st.lists(WORDS, max_size=4), verb=st.sampled_from([*cli.known_verbs(), ""]))
def test_any_words(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb in ("bench attention", "profile", "tune", "doctor", "pull", "run"):  # they measure, fetch or write long
        words = ["--no-such-flag", *words]
    if verb == "validate":  # one error for each file
        words = words[:1]
    tried(capsys, verb, *words)


@bounded
@given(prompt=st.text(min_size=1, max_size=60), raw=st.booleans(), stop=st.text(max_size=3))
def test_prompts(tiny: Path, capsys: pytest.CaptureFixture[str], prompt: str, raw: bool, stop: str) -> None:
    more = ["--raw"] if raw else []
    done = tried(capsys, "run", tiny, f"--prompt={prompt}", f"--stop={stop}", "-n", 3, "-q", *more)
    assert done.code == 0 or not stop or prompt == "-" or "\0" in prompt + stop or not prompt.strip(), done


TEMPLATE_PARTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("{{ messages }}", "{{ bos_token }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}"),
                *("{% if x %}", "{% endif %}", "{% set a = 'x' * 9 ** 9 %}", "{{ a }}", "{{ ''.__class__ }}"),
                *("{{ 1/0 }}", "{{ messages[0] }}", "{%", "}}", "{% macro f(n) %}{{ f(n) }}{% endmacro %}"),
                *("{{ f(1) }}", "{{ range(10**9)|list }}", "{{ raise_exception('no') }}", "{% generation %}"),
                *("{{ strftime_now('%Y') }}", "{{ messages | tojson }}", "{{ messages|join(',')|upper }}", "{# x #}"),
            ]
        ),
        st.text(max_size=5),
    ),
    max_size=6,
).map("".join)


@settings(bounded, max_examples=max(EXAMPLES // 2, 1))
@given(template=TEMPLATE_PARTS)
def test_chat_templates(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template, encoding="utf-8", errors="replace", newline="")
    tried(capsys, "run", tiny, "-p", "hi", "-n", 1, "--chat-template", file)


@bounded
@given(data=st.one_of(st.binary(max_size=60), st.text(max_size=40).map(lambda t: f"[run]\nstop = {t!r}\n".encode())))
def test_configurations(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(data)
    start = time.monotonic()
    plain(call(capsys, "models", HGGUF_CONFIG=str(file)), time.monotonic() - start)
