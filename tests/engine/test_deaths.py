"""The end of a child names its cause: memory, disk, a signal from outside, a missing package, an assertion; a file is
blamed only for what lies in a file."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tinygguf import build

from hybridgen_gguf import processes
from hybridgen_gguf.engine.child import Child
from hybridgen_gguf.engine.refusals import FILE, MEMORY, OURS, abort_hint, refusal_of
from hybridgen_gguf.errors import EngineError, Failed, HgError, NoSpace, UsageError
from hybridgen_gguf.make.convert import converter_folder

SOURCES = (
    "src/llama-model-loader.cpp", "src/llama-model.cpp", "src/llama-vocab.cpp", "src/llama-hparams.cpp",
    "src/llama.cpp", "ggml/src/gguf.cpp",
)  # fmt: skip
_MESSAGE = re.compile(
    r"(?:runtime_error|invalid_argument|LLAMA_LOG_ERROR|GGML_LOG_ERROR|GGML_ABORT)\s*\(((?:[^;]|;(?!\n))*?)\);"
)


@pytest.mark.parametrize("source", SOURCES)
def test_every_message_of_the_loader_has_a_meaning(source: str) -> None:
    text = (converter_folder() / source).read_text(encoding="utf-8")
    messages = {"".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call)) for call in _MESSAGE.findall(text)}
    # what a caller of the library does wrong, or a message that only says "internal"
    unknown = {m for m in messages if len(m) > 3 and refusal_of(m) is OURS and not _known_as_ours(m)}
    assert messages and not unknown


def _known_as_ours(message: str) -> bool:
    from hybridgen_gguf.engine import refusals

    return any(meaning is OURS and re.search(pattern, message) for pattern, meaning in refusals._TABLE)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("tensor 'blk.0.attn_q.weight' has wrong shape; expected 4, 4, got 4, 5", "file"),
        ("encountered bad_alloc error while reading value for key 'x'", "memory"),
        ("unable to allocate CPU buffer", "memory"),
        ("unknown model architecture: 'new'", "newer"),
        ("unknown pre-tokenizer type: 'mine'", "newer"),
        ("illegal split file idx: 1 (file: x), model must be loaded with the first split", "file"),
        ("failed to open GGUF file 'x' (Permission denied)", "disk"),
        ("CLIP cannot be used as main model, use it with --mmproj instead", "kind"),
        ("no backends are loaded", "device"),
        ("LLAMA_SPLIT_MODE_TENSOR not implemented for architecture 'gemma3'", "asked"),
    ],
)
def test_refusals(words: str, cause: str) -> None:
    assert refusal_of(words).cause == cause


def test_aborts_blame_the_file_only_where_files_are_read() -> None:
    assert abort_hint("llama-vocab.cpp:1812: GGML_ASSERT(id < n) failed") == FILE.hint
    assert abort_hint("ggml-backend.cpp:95: GGML_ASSERT(buffer) failed") == OURS.hint
    assert "RPC" in abort_hint("ggml-rpc.cpp:400: Remote RPC server crashed or returned malformed response")
    assert abort_hint("what():  std::bad_alloc") == MEMORY.hint


@pytest.mark.parametrize(
    ("code", "words", "kind", "says"),
    [
        (-9, "", Failed, "killed, most likely because memory ran out"),
        (-15, "", Failed, "stopped from outside by SIGTERM"),
        (-24, "", Failed, "processor time"),
        (-25, "", NoSpace, "so large a file"),
        (-4, "", EngineError, "instructions that this processor lacks"),
        (1, "MemoryError", Failed, "not enough memory"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", Failed, "not enough memory"),
        (-6, "libgomp: Thread creation failed: Resource temporarily unavailable", EngineError, "threads"),
        (1, "OSError: [Errno 28] No space left on device", NoSpace, "is full"),
        (1, "ModuleNotFoundError: No module named 'numpy'", Failed, "package numpy is missing"),
        (-11, "", None, ""),
        (-6, "x.cpp:1: GGML_ASSERT(false) failed", None, ""),
    ],
)
def test_ends(code: int, words: str, kind: type[HgError] | None, says: str) -> None:
    found = processes.death("the engine", code, words)
    assert (found is None) if kind is None else (type(found) is kind and says in str(found)), found
    assert found is None or "damaged" not in found.hint


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (MemoryError(), Failed, "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), NoSpace, "the disk of /x is full"),
        (OSError("1000 requested and 12 written"), NoSpace, "is full"),  # numpy's tofile
        (ModuleNotFoundError("No module named 'torch'", name="torch"), Failed, "package torch is missing"),
        (RuntimeError("can't start new thread"), EngineError, "threads"),
        (KeyError("x"), EngineError, "internal error KeyError"),
        (UsageError("no", "so"), UsageError, "no"),
    ],
)
def test_exceptions_cross_as_what_they_mean(error: Exception, kind: type[HgError], says: str) -> None:
    meant = processes.error_of(error)
    again = processes.unpacked(processes.packed(meant))
    assert type(again) is kind and says in again.what and (again.what, again.hint) == (meant.what, meant.hint)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_child_killed_from_outside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    build(str(path))
    with Child() as child:
        assert child.check(path) is None
        assert child._process is not None
        os.kill(child._process.pid, getattr(signal, name))
        problem = child.check(path)
        assert problem is not None and (name in problem or "killed" in problem)
        assert child.check(path) is None, "the next question starts another child"


def test_a_child_under_a_memory_limit_names_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    build(str(path))
    code = (
        "import sys; from pathlib import Path; import resource\n"
        "from hybridgen_gguf.engine.child import Child\n"
        "resource.setrlimit(resource.RLIMIT_AS, (120 << 20, -1))\n"
        "print(Child().check(Path(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=100)
    assert "damaged" not in done.stdout and re.search(r"memory|no process", done.stdout), done


def test_children_have_default_signals_whatever_the_parent_made_of_them() -> None:
    code = (
        "import signal; from hybridgen_gguf import processes; out = processes.serve()\n"
        "names = [s.name for s in signal.valid_signals() if isinstance(s, signal.Signals) "
        "and signal.getsignal(s) is signal.SIG_IGN]\n"
        "import json; out.write(json.dumps({'ignored': names, 'mask': len(signal.pthread_sigmask(0, []))}).encode())\n"
    )
    parent = (
        "import signal, subprocess, sys\n"
        "[signal.signal(getattr(signal, n), signal.SIG_IGN) for n in ('SIGTERM', 'SIGHUP', 'SIGINT', 'SIGQUIT')]\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})\n"
        "sys.stdout.write(subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True, text=True).stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent, code], capture_output=True, text=True, timeout=60, check=True)
    assert '"mask": 0' in done.stdout and "SIGTERM" not in done.stdout and "SIGHUP" not in done.stdout, done
    assert "SIGINT" in done.stdout, "Ctrl-C is the parent's"
