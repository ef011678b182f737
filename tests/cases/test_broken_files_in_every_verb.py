"""Cut, absurd, self-contradicting and split files through the command line: every verb agrees, and none dies.

Cases D-01 to D-04.
"""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinygguf
from command_line import COMMAND, QUIET, call, refused, spawn

Capture = pytest.CaptureFixture[str]


def said_by_all(capsys: Capture, path: Path) -> str:
    """The one error line of run, plan, bench, inspect and validate."""
    lines = set()
    for arguments in (
        ("run", path, "-p", "hi"),
        ("plan", path),
        ("bench", path),
        ("inspect", path),
        ("validate", path),
    ):
        done = call(capsys, *arguments)
        assert done.code == 1 and done.out == "", (arguments, done)
        lines.add(done.err.splitlines()[0])
    assert len(lines) == 1, lines
    return lines.pop()


@pytest.mark.parametrize("keep", [300_000, -1, 24, 3, 0])
def test_d01_cut(tiny: Path, tmp_path: Path, capsys: Capture, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:keep])
    assert "cut.gguf" in said_by_all(capsys, cut)


def test_d01_a_real_model_cut_in_half(smollm2: Path, tmp_path: Path, capsys: Capture) -> None:
    cut = tmp_path / "half.gguf"
    with smollm2.open("rb") as file:
        cut.write_bytes(file.read(smollm2.stat().st_size // 2))
    line = said_by_all(capsys, cut)
    assert "runs past the end" in line and f"{smollm2.stat().st_size:,} bytes expected" in line


@pytest.mark.parametrize(
    "content",
    [
        b"hello, a text file\n",
        b"GGML" + bytes(40),
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        bytes(1000),
        b"PK\x03\x04" + bytes(99),
    ],
)
def test_d01_foreign_files(tmp_path: Path, capsys: Capture, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    assert "x.gguf" in said_by_all(capsys, tmp_path / "x.gguf")


def test_d01_what_is_no_file(tmp_path: Path, capsys: Capture) -> None:
    refused(call(capsys, "run", tmp_path, "-p", "hi"), 1, "is a directory")
    refused(call(capsys, "run", "/dev/zero", "-p", "hi"), 1, "is not a regular file")
    refused(call(capsys, "run", tmp_path / "none.gguf", "-p", "hi"), 4, "none.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert call(capsys, "run", tmp_path / "loop.gguf", "-p", "hi").code in (1, 4)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<QQQ", 0, 1, 0xFFFFFFFFFFFF),
        struct.pack("<QQ", 0, 1 << 40),
        struct.pack("<QQ", 1 << 40, 0),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 512 << 20) + bytes(1 << 20),
    ],
)
def test_d02_absurd_lengths_take_neither_memory_nor_time(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "k.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    done = subprocess.run(
        [*COMMAND, "inspect", path], capture_output=True, text=True, timeout=10, env=QUIET, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)),
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("error: ") and "k.gguf" in done.stderr


def test_d03_the_loop_and_the_caller_live_on(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    bad = tinygguf.build(tmp_path / "dup.gguf", tokens={100: "<0x41>"})
    done = call(capsys, "validate", bad, tiny)
    assert done.code == 1 and done.out == f"{tiny}: ok\n" and done.err.count("\n") == 1
    refused(call(capsys, "run", bad, "-p", "hi"), 1, "tokens 68 and 100 have the same text '<0x41>'")


@pytest.mark.parametrize("fault", [{"tokens": {100: "<0x41>"}}, {"extra": ["foo", "foo"]}])
def test_d03_a_long_prompt_is_counted_where_an_abort_harms_nobody(
    tmp_path: Path, capsys: Capture, fault: dict[str, Any]
) -> None:
    """Before planning its tokens are counted, and that opens the vocabulary."""
    bad = tinygguf.build(tmp_path / "dup.gguf", **fault)
    refused(call(capsys, "run", bad, "-p", "word " * 2000), 1, "have the same text")


@pytest.mark.parametrize("arguments", [("run", "-p", "hi"), ("bench", "-p", 2, "-n", 0, "-r", 1)])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_d03_an_engine_that_gives_up_while_it_works(
    tmp_path: Path, arguments: tuple[object, ...], threads: str
) -> None:
    """Heads of 33 values load, and abort in the first step."""
    odd = tinygguf.build(tmp_path / "odd.gguf", embd=66, heads=2, drops=["llama.rope.dimension_count"])
    verb, *flags = arguments
    refused(spawn(verb, odd, *flags, HGGUF_THREADS=threads), 1, "the engine gave up: ops.cpp", "n_dims % 2 == 0")


# Headers that contradict themselves: the engine aborts on some, refuses others; all must end in one line of ours.
CONTRADICTIONS = {
    "tokenizer.ggml.model=str:bert": "",
    "tokenizer.ggml.model=str:foo": "unknown tokenizer: 'foo'",
    "tokenizer.ggml.model=str:gpt2": "",
    "tokenizer.ggml.eos_token_id=i32:-5": "tokenizer.ggml.eos_token_id is -5",
    "llama.attention.layer_norm_rms_epsilon=f32:nan": "layer_norm_rms_epsilon",
    "llama.attention.layer_norm_rms_epsilon=f32:-1": "layer_norm_rms_epsilon",
    "llama.rope.freq_base=f32:0": "rope.freq_base",
    "llama.rope.freq_base=f32:nan": "rope.freq_base",
    "llama.rope.scaling.type=str:foo": "",
    "llama.rope.dimension_count=u32:7": "llama.rope.dimension_count",
    "llama.expert_count=u32:8": "",
    "llama.expert_count=u32:100000": "",
    "llama.expert_used_count=u32:9": "",
    "llama.block_count=u32:0": "",
    "llama.block_count=u32:3": "'blk.2.attn_norm.weight' not found",
    "llama.block_count=u32:4000000000": "4,000,000,000",
    "llama.attention.head_count=u32:0": "attn_q.weight",
    "llama.attention.head_count_kv=u32:3": "attn_k.weight",
    "llama.attention.head_count_kv=u32:4000000000": "",
    "llama.embedding_length=u32:4294967295": "",
    "llama.feed_forward_length=u32:7": "ffn_",
    "general.architecture=u32:3": "general.architecture",
    "general.alignment=u32:3": "general.alignment",
    "general.type=str:adapter": "adapter",
    "split.count=u32:3": "split",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "says"), CONTRADICTIONS.items())
def test_d03_headers_that_contradict_themselves(tmp_path: Path, capsys: Capture, key: str, says: str) -> None:
    bad = tinygguf.build(tmp_path / "bad.gguf", sets=[key])
    done = call(capsys, "run", bad, "-p", "hi", "--raw", "-n", 1)
    refused(done, 3 if done.code == 3 else 1, says)
    assert call(capsys, "validate", bad).code == 1


def test_d03_a_model_without_a_vocabulary_is_sound_and_reads_no_text(tmp_path: Path, capsys: Capture) -> None:
    mute = tinygguf.build(tmp_path / "mute.gguf", sets=["tokenizer.ggml.model=str:none"])
    assert call(capsys, "validate", mute).code == call(capsys, "plan", mute).code == 0
    for prompt in ("hi", "word " * 2000):
        refused(call(capsys, "run", mute, "-p", prompt, "-n", 1), 2, "has no vocabulary")


def test_d03_a_vocabulary_without_one_byte(tmp_path: Path, capsys: Capture) -> None:
    """The engine aborts when a text holds that byte, and only then."""
    odd = tinygguf.build(tmp_path / "odd.gguf", tokens={3 + 0xE6: "nothing"})
    refused(call(capsys, "run", odd, "-p", "hi", "-n", 1), 1, "odd.gguf")
    assert call(capsys, "validate", odd).code == 1


@pytest.mark.parametrize(
    "tokens",
    [{103: "d00d"}, {100: ""}, {13: "x"}, {100: "a" * 100_000}, {100: "\x00"}, {1: ""}, {2: "<s>"}],
    ids=range(7),
)
def test_d03_odd_vocabularies_never_kill_the_process(tmp_path: Path, tokens: dict[int, str]) -> None:
    odd = tinygguf.build(tmp_path / "odd.gguf", tokens=tokens)
    command = [*COMMAND, "run", odd, "-p", "hi", "--raw", "-n", "60", "--ignore-eos", "--temp", "5", "--top-k", "0"]
    done = subprocess.run(command, capture_output=True, timeout=60, env=QUIET, check=False)
    assert done.returncode in (0, 1), done
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["blk.1.ffn_norm.weight", "token_embd.weight", "tokenizer.ggml.tokens"])
def test_d03_what_is_missing_is_named(tmp_path: Path, capsys: Capture, missing: str) -> None:
    bad = tinygguf.build(tmp_path / "bad.gguf", drops=[missing])
    refused(call(capsys, "run", bad, "-p", "hi"), 1, "bad.gguf")
    assert missing.removeprefix("tokenizer.ggml.")[:5] in call(capsys, "validate", bad).err


def test_d04_any_part_and_any_link_stand_for_the_set(tmp_path: Path, capsys: Capture) -> None:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    whole = tinygguf.build(tmp_path / "whole.gguf")
    parts = sorted(tmp_path.glob("m-*.gguf"))
    (tmp_path / "other name.gguf").symlink_to(parts[1])
    expected = call(capsys, "run", whole, "-p", "hi", "-n", 4, "-s", 1).out
    assert len(expected) > 1
    for path in (*parts, tmp_path / "other name.gguf"):
        done = call(capsys, "run", path, "-p", "hi", "-n", 4, "-s", 1)
        assert (done.code, done.out) == (0, expected)
    sizes = call(capsys, "inspect", parts[2], "--json").json["model"]
    assert (sizes["n_layers"], sizes["n_tensors"]) == (2, 20)


def test_d04_an_absent_part_is_named(tmp_path: Path, capsys: Capture) -> None:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        refused(call(capsys, "run", path, "-p", "hi"), 4, "m-00002-of-00003.gguf")
        assert "m-00002-of-00003.gguf" in call(capsys, "validate", path).err


def test_python_says_the_same(tmp_path: Path) -> None:
    """The engine aborts on this file; a program that uses the package lives on."""
    bad = tinygguf.build(tmp_path / "dup.gguf", tokens={100: "<0x41>"})
    code = f"""
import hybridgen_gguf
try:
    hybridgen_gguf.load({str(bad)!r})
except hybridgen_gguf.BadFile as error:
    print(error.what)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "have the same text" in done.stdout


def test_d10_python_files_in_the_folder_one_stands_in_do_not_run(tiny: Path, tmp_path: Path) -> None:
    for name in ("numpy", "llama_cpp", "jinja2", "json", "hybridgen_gguf"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n", encoding="utf-8")
    start = f"from hybridgen_gguf.cli.app import main; main(['run', {str(tiny)!r}, '-p', 'hi', '-n', '1'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start], cwd=tmp_path, capture_output=True, timeout=60, check=False,
        env={**os.environ, **QUIET},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert not list(tmp_path.glob("ran-*"))
