"""Python children of this program: how one is started, spoken to in JSON lines, and ended, and what its end means.

    start, start_script    a module of ours; a lone file that sees no package and no environment
    say, hear  one JSON object a line, each way
    serve      the child's side: signals and streams put right, answers apart from what libraries print
    packed, unpacked, error_of    an error on its way from child to parent
    death      how a child that gave no answer ended, as an error that names the cause

Knows no engine. Invariant: nothing is blamed on a file here; who knows the work adds what its own words mean.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from . import errors
from .errors import EngineError, Failed, HgError, NoSpace
from .printable import printable

Child = subprocess.Popen[bytes]
_ROOT = Path(__file__).resolve().parent.parent
_TAIL = 8192  # bytes of a child's last words that are looked at
_running: set[Child] = set()
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MEMORY_HINT = "close other programs, use a smaller model, or raise the limit (ulimit -v, or the container's)"


def start(
    module: str, *arguments: str, log: BinaryIO | Any = subprocess.DEVNULL, environment: Mapping[str, str] | None = None
) -> Child:
    """`python -m module arguments` in a session of its own, so that Ctrl-C is for the parent. Its stderr goes to `log`.

    `environment`: in place of this process's. Raises Failed when the system starts no process.
    """
    env = dict(os.environ if environment is None else environment)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH", ""))))
    # -P: a file named numpy.py in the folder one happens to stand in must not be imported.
    return _popen(["-P", "-m", module, *arguments], log, env)


def start_script(path: Path, *arguments: str) -> Child:
    """A file that sees neither packages nor the environment (`-I -S`). Raises Failed when no process starts."""
    kept = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}
    return _popen(["-I", "-S", str(path), *arguments], subprocess.DEVNULL, kept)


def _popen(arguments: Sequence[str], log: Any, environment: Mapping[str, str]) -> Child:
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    try:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment, start_new_session=True)
        _running.add(child)
        return child
    except OSError as error:
        what = f"no process could be started: {error.strerror or error}"
        raise Failed(what, "raise the limit on processes (ulimit -u) or free some memory") from None


def open_log() -> BinaryIO | Any:
    """An unnamed file for a child's last words: in memory where the system can, as the disk may be what is full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("hgguf"), "w+b", buffering=0)
    return tempfile.TemporaryFile()


def say(child: Child, message: Mapping[str, Any]) -> None:
    """Sends one message. A child that is gone is noticed when it is heard."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(message).encode() + b"\n")
        child.stdin.flush()


def hear(child: Child, timeout: float | None = None) -> dict[str, Any] | None:
    """The next message; None when the child ended, or said nothing for `timeout` seconds."""
    assert child.stdout is not None
    if timeout is not None and not select.select([child.stdout], [], [], timeout)[0]:
        return None
    line = child.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def end(child: Child, patience: float = 0.0) -> int:
    """Closes its input and waits for `patience` seconds; what then still runs is killed, with what it started.

    Without patience it is killed first: a child that watches its input takes a closed one for the parent's death and
    clears away what it has written. Returns the exit code.
    """
    if patience:
        with contextlib.suppress(BrokenPipeError):
            if child.stdin is not None:
                child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    if child.poll() is None:
        _kill(child)
    child.wait()
    _running.discard(child)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    return child.returncode


def kill_all() -> None:
    """Kills every child that runs, for a process that is about to end. May be called from any thread."""
    for child in tuple(_running):
        if child.returncode is None:
            _kill(child)


def _kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def last_words(log: BinaryIO | Any) -> str:
    """The end of what a child wrote to its `log`."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL))
    return str(log.read().decode("utf-8", "replace"))


# --- the child's side ---


def serve() -> BinaryIO | Any:
    """What every child does first; returns the stream for its answers. What libraries print goes to the log.

    Signals and their mask are the system's defaults again, whatever the parent had made of them. SIGINT alone is
    ignored: Ctrl-C is the parent's to handle, which ends the child by closing its input.
    """
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return answers


def packed(error: HgError) -> dict[str, str]:
    """An error as JSON can hold it."""
    return {"kind": type(error).__name__, "what": error.what, "hint": error.hint}


def unpacked(error: Mapping[str, str]) -> HgError:
    """The error that was packed."""
    kind = getattr(errors, error["kind"], Failed)
    good = isinstance(kind, type) and issubclass(kind, HgError)
    return (kind if good else Failed)(error["what"], error["hint"])


def error_of(error: BaseException) -> HgError:
    """What an exception of Python means to a user. A fault of ours is called one."""
    if isinstance(error, HgError):
        return error
    if isinstance(error, MemoryError):
        return _no_memory()
    if isinstance(error, ModuleNotFoundError):
        return _no_package(error.name or "?")
    text = printable(" ".join(str(error).split()), limit=200)
    if isinstance(error, OSError) and (error.errno in _NO_ROOM or re.search(r"\d+ requested and \d+ written", text)):
        return _no_room(Path(str(error.filename)).parent if error.filename else None)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return _no_memory()
    if (isinstance(error, OSError) and error.errno == errno.EAGAIN) or "start new thread" in text:
        return _no_threads()
    if isinstance(error, ImportError) and _ENDINGS[0].pattern.search(text):
        return _no_memory()
    return EngineError(f"internal error {type(error).__name__}: {text}", "please report this")


# --- how a child ended ---


@dataclass(frozen=True)
class _Ending:
    pattern: re.Pattern[str]
    meaning: str


# In a child's last words, most certain first. These are causes outside of any file.
_ENDINGS = (
    _Ending(
        re.compile(
            r"MemoryError|bad_alloc|[Cc]annot allocate memory|failed to allocate|unable to allocate|out of memory"
            r"|failed to map segment|static TLS",
        ),
        "memory",
    ),
    _Ending(re.compile(r"pthread_create|Resource temporarily unavailable|can't start new thread"), "threads"),
    _Ending(
        re.compile(r"No space left on device|Disk quota exceeded|File too large|basic_ios::clear|No usable temporary"),
        "disk",
    ),
    _Ending(re.compile(r"No module named '?(?P<name>[\w.]+)|ImportError: (?P<why>.*)"), "package"),
)
_FROM_OUTSIDE = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGSTOP")


def death(who: str, code: int, words: str) -> HgError | None:
    """The error for a child `who` ("the engine") that ended by itself with `code`, having said `words`.

    None when it crashed (SIGSEGV, SIGABRT, ...) or ended for a reason that only its work can explain.
    """
    for ending in _ENDINGS:
        if match := ending.pattern.search(words):
            if ending.meaning == "package":
                named = match["name"]
                return _no_package(named) if named else Failed(f"{who} could not start: {match['why'][:200]}", _AGAIN)
            return {"memory": _no_memory, "threads": _no_threads, "disk": _no_room}[ending.meaning]()
    name = signal_name(code)
    if name == "SIGKILL":
        return Failed(
            f"{who} was killed, most likely because memory ran out{_limits()}",
            _MEMORY_HINT + "; the system's log names who killed it",
        )
    if name in _FROM_OUTSIDE:
        return Failed(f"{who} was stopped from outside by {name}", "start it again, and let it run")
    if name == "SIGXCPU":
        return Failed(f"{who} used up its processor time", "raise the limit (ulimit -t)")
    if name == "SIGXFSZ":
        return NoSpace(f"{who} may not write so large a file", "raise the limit (ulimit -f)")
    if name == "SIGILL":
        return EngineError(
            f"{who} has instructions that this processor lacks", "build it on this machine: scripts/setup"
        )
    return None


def signal_name(code: int) -> str:
    """SIGKILL for -9; empty for an exit code."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_AGAIN = "run scripts/setup, or install the package again"


def _limits() -> str:
    try:
        import resource
    except ImportError:
        return ""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if soft == resource.RLIM_INFINITY else f" (the limit ulimit -v is {soft >> 20} MiB)"


def _no_memory() -> Failed:
    return Failed(f"there was not enough memory{_limits()}", _MEMORY_HINT)


def _no_threads() -> Failed:
    return EngineError("the engine could not start its threads", "raise the limit on processes (ulimit -u)")


def _no_room(folder: Path | None = None) -> NoSpace:
    place = printable(str(folder or _temporary()))
    return NoSpace(f"the disk of {place} is full", "free some space, or set TMPDIR to a folder on another disk")


def _temporary() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _no_package(name: str) -> Failed:
    return Failed(f"the Python package {printable(name, limit=80)} is missing", _AGAIN)
