"""Text in any encoding, under any locale, and limits on what a process may have: a plain answer or a plain error.

Cases D-28.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
import rawgguf as raw
from command_line import COMMAND, QUIET, Done, call, refused, spawn

Capture = pytest.CaptureFixture[str]
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # words come as single bytes then


@pytest.mark.parametrize(
    ("data", "says", "hint"),
    [
        ("Grüße".encode("latin-1"), "is not UTF-8 text", "iconv -f ENCODING"),
        ("介绍北京".encode("gbk"), "is not UTF-8 text", "iconv -f ENCODING"),
        ("Grüße".encode("utf-16"), "is UTF-16 text", "iconv -f UTF-16"),
        (b"\xfe\xff" + "Grüße".encode("utf-16-be"), "is UTF-16 text", "iconv -f UTF-16"),
        ("Grüße".encode("utf-32"), "is UTF-32 text", "iconv -f UTF-32"),
        ("a\ud800b".encode("utf-8", "surrogatepass"), "is not UTF-8 text", ""),
        (b"\xc0\xaf\xe0\x80\xaf", "is not UTF-8 text", ""),
        ("漢字".encode()[:-1], "is not UTF-8 text", ""),
        (b"\xef\xbb\xbf\n", "is empty", ""),
    ],
)
def test_d28_a_prompt_in_another_encoding(tiny: Path, tmp_path: Path, data: bytes, says: str, hint: str) -> None:
    (tmp_path / "p.txt").write_bytes(data)
    for done in (spawn("run", tiny, "-f", tmp_path / "p.txt"), spawn("run", tiny, stdin=data)):
        refused(done, 2, says)
        assert hint in done.err


@pytest.mark.parametrize(
    "text",
    [
        *("a\0b", "\x01\x1b[31m\x7f", "\r\n x", "\ufeffx", "\U0010ffff"),
        *("👩\u200d👩\u200d👧🏽 🇫🇷", "e\u0301\u0302", "\u202eשלום مرحبا\u202c"),
    ],
)
def test_d28_any_text_reaches_the_model_whole(tiny: Path, tmp_path: Path, capsys: Capture, text: str) -> None:
    """Every byte is a token here; the model's template adds none of its own but a start token and a space."""
    file = tmp_path / "p.txt"
    file.write_bytes(b"x" + text.encode())
    count = call(capsys, "run", tiny, "--raw", "-f", file, "-n", 1, "--json").json["usage"]["prompt_tokens"]
    space = text.count(" ") * 2  # SentencePiece spells a space with three bytes
    assert count == 1 + 3 + 1 + len(text.encode()) + space


def test_d28_words_of_the_command_line_are_utf8_in_every_locale(tiny: Path) -> None:
    flags = ("-p", "é", "-n", 6, "-s", 1, "--ignore-eos")
    for more in (("-sys", "漢"), ("--chat-template", "{{ '漢' }}{{ messages[0].content }}"), ("--stop", "漢")):
        done = spawn("run", tiny, *flags, *more, **BARE)
        assert (done.code, done.out) == (0, spawn("run", tiny, *flags, *more).out), done


def test_d28_words_that_are_no_text(tiny: Path, capsys: Capture) -> None:
    broken = os.fsdecode(b"\xff\xfe")
    for flag in ("-p", "-sys"):
        assert call(capsys, "run", tiny, "-p", "x", flag, broken, "-n", 1).code == 0
    assert (
        call(
            capsys,
            "run",
            tiny,
            "-p",
            "x",
            "--chat-template",
            "{{ 'a" + broken + "' }}{{ messages[0].content }}",
            "-n",
            1,
        ).code
        == 0
    )
    refused(call(capsys, "run", tiny, "-p", "x", "--stop", broken, "-n", 1), 2, "a stop string is not valid text")


def test_d28_files_without_an_end(tiny: Path, capsys: Capture) -> None:
    refused(call(capsys, "run", tiny, "-p", "x", "--plan", "/dev/zero"), 2, "/dev/zero is not a plan")
    refused(call(capsys, "models", HGGUF_CONFIG="/dev/zero"), 2, "/dev/zero is not valid TOML")
    refused(call(capsys, "run", tiny, "-p", "x", "--chat-template", "/dev/zero"), 4, "no template file")


def limited(tiny: Path, limit: int, value: int, *flags: str) -> Done:
    done = subprocess.run(
        [*COMMAND, "run", tiny, "-p", "hi", "-n", "1", *flags], capture_output=True, timeout=60, check=False,
        env={**os.environ, **QUIET}, preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )  # fmt: skip
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("mib", [120, 150, 200])
def test_d28_little_address_space(tiny: Path, mib: int) -> None:
    done = limited(tiny, resource.RLIMIT_AS, mib << 20)
    assert done.code in (1, 3) and "error: " in done.err and "Traceback" not in done.err, done


@pytest.mark.parametrize("files", [6, 8, 12, 24])
def test_d28_few_open_files(tiny: Path, files: int) -> None:
    done = limited(tiny, resource.RLIMIT_NOFILE, files)
    if done.code:
        refused(done, 1, "Too many open files" if files > 6 else "")


def test_d28_no_file_may_be_written(tiny: Path) -> None:
    assert limited(tiny, resource.RLIMIT_FSIZE, 0, "-q").code == 0


def test_d28_a_shell_that_ignores_interrupts(smollm2: Path) -> None:
    """As in `hgguf ... &` of a script: Ctrl-C at the terminal is for the others."""
    process = subprocess.Popen(
        [*COMMAND, "run", smollm2, "-p", "Tell a story", "-n", "40", "--ignore-eos", "-q"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **QUIET},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (0, b"")


def test_d02_a_table_of_65_000_tensors(tmp_path: Path, capsys: Capture) -> None:
    tensors = b"".join(raw.tensor(f"t{index}", (8,), 32 * index) for index in range(65_000))
    head = b"GGUF" + struct.pack("<IQQ", 3, 65_000, 0)
    path = raw.write(tmp_path, head + tensors + bytes(65_001 * 32))
    start = time.monotonic()
    done = call(capsys, "inspect", path)
    assert done.code == 0 and time.monotonic() - start < 30
    assert "and 61,000 more (--json has all)" in done.out
