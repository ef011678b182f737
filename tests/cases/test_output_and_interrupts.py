"""Start tokens, templates that attack, and output to files, pipes and terminals (D-26 to D-28)."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tinygguf
from command_line import COMMAND, QUIET, call, refused, spawn

Capture = pytest.CaptureFixture[str]
CONTENT = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize("template", [CONTENT, "{{ bos_token }}" + CONTENT])
def test_d26_one_start_token(tmp_path: Path, capsys: Capture, template: str) -> None:
    sets = ["tokenizer.ggml.add_bos_token=bool:true"]
    model = tinygguf.build(tmp_path / "b.gguf", sets=sets, template=template)

    def prompt_tokens(*arguments: str) -> int:
        reply = call(capsys, "run", model, *arguments, "-n", 1, "--json").json
        return int(reply["usage"]["prompt_tokens"])

    raw = prompt_tokens("--raw", "-p", "hello")
    assert raw == prompt_tokens("-p", "hello") == prompt_tokens("--raw", "-p", "<s>hello")
    # Typed by a user in a chat it is text, three tokens here, and no second start token.
    assert prompt_tokens("-p", "<s>hello") == raw + 3


def test_d26_a_model_that_wants_none(tmp_path: Path, smollm2: Path, capsys: Capture) -> None:
    plain = tinygguf.build(tmp_path / "n.gguf", sets=["tokenizer.ggml.add_bos_token=bool:false"])
    with_bos = tinygguf.build(tmp_path / "y.gguf", sets=["tokenizer.ggml.add_bos_token=bool:true"])
    counts = [
        call(capsys, "run", model, "--raw", "-p", "hello", "-n", 1, "--json").json["usage"]["prompt_tokens"]
        for model in (plain, with_bos)
    ]
    assert counts[1] == counts[0] + 1
    assert call(capsys, "run", smollm2, "--raw", "-p", "hello", "-n", 1, "--json").json["usage"]["prompt_tokens"] == 1


ATTACKS = {
    "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}": "sandbox forbids",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "sandbox forbids",
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}": "takes longer than",
    "{% set x = namespace(s='ab') %}{% for a in range(90) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}": "",
    "{{ 'x'*30000000000 }}": "memory",
    "{{ ('%99999999999d' % 1) }}": "",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "",
    "{{ 9**(9**9) }}": "",
    "{% for m in messages %}{{ m.content ": "does not parse",
    "{{ raise_exception('no ' * 3 ~ '\\n\\x1b[2J') }}": "",
    "{% include '/etc/passwd' %}": "",
    "{{ messages[99]['content'] }}": "",
    "": "",
}


@pytest.mark.parametrize("template", ATTACKS, ids=range(len(ATTACKS)))
def test_d27_templates_that_attack(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "MARK"
    model = tinygguf.build(tmp_path / "t.gguf", template=template.replace("MARK", str(marker)))
    start = time.monotonic()
    done = call(capsys, "run", model, "-p", "hello", "-n", 1)
    assert time.monotonic() - start < 30
    if done.code:
        refused(done, 1, ATTACKS[template])
        assert "--raw" in done.err and "\x1b" not in done.err
    else:
        assert not ATTACKS[template]
    assert call(capsys, "run", model, "-p", "hello", "-n", 1, "--raw").code == 0
    assert call(capsys, "run", model, "-p", "hello", "-n", 1, "--chat-template", "chatml").code == 0
    seen = call(capsys, "inspect", model)
    assert seen.code == 0 and "\x1b" not in seen.out
    assert not marker.exists()


def test_d27_a_template_from_the_command_line_is_no_safer(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    attack = "{{ cycler.__init__.__globals__.os }}"
    refused(call(capsys, "run", tiny, "-p", "x", "-n", 1, "--chat-template", attack), 1, "sandbox forbids")
    (tmp_path / "t.jinja").write_text(attack, encoding="utf-8")
    refused(call(capsys, "run", tiny, "-p", "x", "-n", 1, "--chat-template", tmp_path / "t.jinja"), 1, "sandbox")
    refused(call(capsys, "run", tiny, "-p", "x", "-n", 1, "--chat-template", "foo"), 2, "'foo'")


# --- D-28 ---


@pytest.mark.parametrize(
    "environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"LC_ALL": "C"}, {"FORCE_COLOR": "1"}]
)
def test_d28_files_hold_the_answer_only(tiny: Path, environment: dict[str, str]) -> None:
    done = spawn("run", tiny, "-p", "hi", "-n", 8, "-s", 1, "--ignore-eos", **environment)
    assert done.code == 0 and "\x1b" not in done.out + done.err
    assert done.err.startswith("[prompt ") and done.err.count("\n") == 1
    assert "hi" not in done.out and "prompt" not in done.out


@pytest.mark.parametrize(
    "verb", [("models",), ("inspect", "MODEL"), ("plan", "MODEL"), ("engine",), ("--help",), ("run", "--help")]
)
def test_d28_no_colour_in_a_file(tiny: Path, verb: tuple[str, ...]) -> None:
    done = spawn(*(str(tiny) if word == "MODEL" else word for word in verb), NO_COLOR="1", COLUMNS="40")
    assert done.code == 0 and "\x1b" not in done.out and done.err == ""


@pytest.mark.parametrize(
    "arguments", [("run", "MODEL", "-p", "hi", "-n", "60", "--ignore-eos"), ("inspect", "MODEL"), ("bench", "--help")]
)
def test_d28_a_reader_that_leaves(tiny: Path, arguments: tuple[str, ...]) -> None:
    command = [*COMMAND, *(str(tiny) if word == "MODEL" else word for word in arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env={**os.environ, **QUIET}
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    told = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(30) == 0 and not told.startswith("error")


def shell(line: str, *words: object) -> tuple[int, str, str]:
    """`line` by sh, with $H for hgguf and $1... for `words`."""
    done = subprocess.run(
        ["sh", "-c", line.replace("$H", shlex.join(COMMAND)), "sh", *map(str, words)],
        capture_output=True, timeout=60, check=False, env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("verb", ["run $1 -p hi -n 2", "inspect $1", "models", "plan $1 --json", "--help"])
def test_d28_a_full_disk_under_stdout(tiny: Path, verb: str) -> None:
    code, _, told = shell(f"$H {verb} > /dev/full", tiny)
    assert code == 1 and told.startswith("error: ") and "No space left" in told and told.count("\n") == 2


def test_d28_closed_streams(tiny: Path) -> None:
    assert shell("$H run $1 -p hi -n 2 <&-", tiny)[0] == 0
    assert shell("$H run $1 -p hi -n 2 2>&-", tiny)[0] == 0
    assert shell("$H run nothing.gguf -p hi -n 2 2>&-")[0] == 4
    assert shell("$H run $1 -p hi -n 2 2>/dev/full", tiny)[0] == 0
    code, _, told = shell("$H run $1 -p hi -n 2 >&-", tiny)
    assert code == 1 and told.startswith("error: ") and "Traceback" not in told
    assert shell("$H run $1 -p hi -n 2 <&- >&- 2>&-", tiny)[0] == 1
    code, _, told = shell("$H run $1 -n 2 <&-", tiny)
    assert code == 2 and told.startswith("error: there is no prompt")


def test_d28_the_prompt_from_a_pipe_or_a_file(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = ("-n", 6, "-s", 1, "--ignore-eos")
    expected = call(capsys, "run", tiny, "-p", "hé 漢", *flags).out
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbf" + "hé 漢\n".encode())
    assert call(capsys, "run", tiny, "-f", tmp_path / "p.txt", *flags).out == expected
    assert spawn("run", tiny, *flags, stdin="hé 漢\n".encode()).out == expected
    assert spawn("run", tiny, "-p", "-", *flags, stdin="hé 漢".encode(), LC_ALL="C", PYTHONUTF8="0").out == expected
    assert spawn("run", tiny, "-p", "hé 漢", *flags, LC_ALL="C", PYTHONUTF8="0").out == expected
    refused(spawn("run", tiny, *flags, stdin=b"\xff\xfd"), 2, "standard input is not UTF-8")
    refused(spawn("run", tiny, *flags, stdin=b""), 2, "the prompt is empty")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfd")
    refused(call(capsys, "run", tiny, "-f", tmp_path / "p.txt"), 2, "p.txt is not UTF-8")
    refused(call(capsys, "run", tiny, "-f", tmp_path / "none.txt"), 4, "none.txt")
    refused(call(capsys, "run", tiny, "-f", tmp_path), 4, "Is a directory")
    refused(call(capsys, "run", tiny, "-f", "/dev/zero"), 2, "/dev/zero holds more than 64.00 MiB")


def test_d28_without_a_terminal(tiny: Path) -> None:
    process = subprocess.run(
        [*COMMAND, "run", tiny, "-p", "hi", "-n", "2"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
        start_new_session=True, env={**os.environ, **QUIET}, check=False,
    )  # fmt: skip
    assert process.returncode == 0 and process.stdout


class Terminal:
    """A process whose three streams are a terminal of `columns`, and what appeared on it."""

    def __init__(self, *arguments: object, columns: int = 80, **environment: str) -> None:
        self.master, slave = pty.openpty()
        settings = {**os.environ, **QUIET, "TERM": "xterm", "COLUMNS": str(columns), **environment}
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, env=settings, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def read(self, until: bytes = b"", seconds: float = 60) -> str:
        """Reads to `until`, or to the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and until in self.seen):
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:  # the other end is closed
                    break
        return self.seen.decode(errors="replace")

    def finish(self) -> tuple[int, str]:
        text = self.read()
        os.close(self.master)
        return self.process.wait(30), text


def test_d28_a_terminal_obeys_nothing_that_a_model_writes(tmp_path: Path) -> None:
    """Token 27 is ESC here, and the bias makes the model write little else."""
    model = tinygguf.build(tmp_path / "t.gguf")
    escape = 3 + 0x1B
    flags = ("-p", "x", "-n", 5, "-q", "--raw", "--logit-bias", f"{escape}+1000")
    assert "\x1b" * 5 in spawn("run", model, *flags).out
    code, text = Terminal("run", model, *flags, TERM="dumb").finish()
    assert code == 0 and "\x1b" not in text and "�" * 5 in text


@pytest.mark.parametrize("columns", [20, 80])
def test_d28_bars_vanish(smollm2: Path, columns: int) -> None:
    code, text = Terminal("run", smollm2, "-p", "word " * 200, "-n", 3, "--ignore-eos", columns=columns).finish()
    assert code == 0
    last = text.replace("\x1b[?25h", "").rpartition("\x1b[2K")[2]  # what stands after the last line was erased
    assert "reading the prompt" not in last and "loading" not in last and "answer 3 tokens" in last


def test_d28_a_narrow_terminal(tiny: Path) -> None:
    for verb in (("inspect", tiny), ("plan", tiny, "--explain"), ("models",), ("--help",), ("run", "--help")):
        code, text = Terminal(*verb, columns=24).finish()
        assert code == 0 and "Traceback" not in text


# --- Ctrl-C ---


def interrupted(*arguments: object, after: bytes, seconds: float = 60) -> tuple[int, float, str]:
    """Exit code, seconds from Ctrl-C to the end, and the text, of a process interrupted once `after` was seen."""
    terminal = Terminal(*arguments)
    assert after.decode() in terminal.read(after, seconds)
    start = time.monotonic()
    os.kill(terminal.process.pid, signal.SIGINT)
    code, text = terminal.finish()
    return code, time.monotonic() - start, text


def test_ctrl_c_while_a_long_prompt_is_read(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 700, encoding="utf-8")
    code, seconds, text = interrupted("run", smollm2, "-f", tmp_path / "long.txt", "-n", 2, after=b"reading the prompt")
    assert code == 130 and seconds < 10 and "cancelled" in text and "Traceback" not in text


def test_ctrl_c_while_writing_keeps_the_text(smollm2: Path) -> None:
    code, seconds, text = interrupted(
        "run", smollm2, "--raw", "-p", "Count: 1 2 3", "--temp", 0, "-n", 3000, "--ignore-eos", after=b" 4 5"
    )
    assert code == 130 and seconds < 10 and " 4 5" in text and "cancelled" in text


def test_ctrl_c_while_loading(smollm2: Path) -> None:
    """An interrupt that falls into one of the engine's callbacks must not be swallowed there."""
    for _ in range(3):
        code, _, text = interrupted("run", smollm2, "-p", "x", "-n", 400, "--ignore-eos", "-q", after=b"loading")
        assert code == 130 and "Traceback" not in text and "Exception ignored" not in text


def test_ctrl_c_while_modules_load(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import sys, time; sys.stdout.write('.'); sys.stdout.flush(); time.sleep(60)")
    process = subprocess.Popen(
        [*COMMAND, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **QUIET, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.read(1) == b"."
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (-signal.SIGINT, b"")  # to a shell: 130


def test_ctrl_c_in_json_leaves_one_document(smollm2: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", smollm2, "-p", "Tell a story", "-n", "3000", "--ignore-eos", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **QUIET},
    )  # fmt: skip
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    if out:
        assert json.loads(out)["finish_reason"] == "cancelled"
