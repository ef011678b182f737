"""One engine job in a process of its own: the engine can abort, and an abort cannot be caught where it happens.

The parent sends options as one JSON line and reads events as JSON lines; an event with the key "ask" waits until the
parent has looked at it. The child's standard input stays open as a sign of life: when it closes, however the parent
ended, the child removes its scratch files and stops. Invariant: after `run_job` returns or raises, the child is gone;
unless it returned, so are the scratch paths.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .. import errors
from ..errors import EngineError, Failed, HgError
from ..printable import printable
from .target import remove

JOBS = {
    "forecast": "hybridgen_gguf.engine.jobs.quantize:forecast_job",
    "quantize": "hybridgen_gguf.engine.jobs.quantize:quantize_job",
    "imatrix": "hybridgen_gguf.engine.jobs.imatrix:imatrix_job",
    "compare": "hybridgen_gguf.engine.jobs.compare:compare_job",
    "probe_errors": "hybridgen_gguf.engine.jobs.type_error:type_error_job",
    "tokenize": "hybridgen_gguf.engine.jobs.check:check_job",
    "convert": "hybridgen_gguf.make.converter:convert_job",
}
Event = Mapping[str, Any]
Send = Callable[[Event], None]
_TAIL = 4096


def run_job(
    job: str,
    options: Mapping[str, Any],
    on_event: Callable[[Event], None] | None = None,
    scratch: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs `job` in a child and returns its result. `scratch`: what to remove when the job does not finish.

    Raises the error the child reported, what `on_event` raises, or EngineError when it died of a signal or ended
    without a result.
    """
    with tempfile.TemporaryFile() as log, stoppable():
        child = _start(job, environment, log)
        try:
            return _converse(child, job, options, on_event, scratch, log)
        except BaseException:
            for path in scratch:
                remove(path)
            raise
        finally:
            _end(child)


def _start(job: str, environment: Mapping[str, str] | None, log: BinaryIO | Any) -> subprocess.Popen[bytes]:
    package_root = str(Path(__file__).resolve().parents[2])
    # Threads that spin while they wait take the cores from whatever else runs; a batch loses nothing by sleeping.
    env = {"OMP_WAIT_POLICY": "passive", **os.environ, **(environment or {}), "PYTHONUTF8": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH", ""))))
    # -P: a file named numpy.py in the folder one happens to stand in must not be imported.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hybridgen_gguf.make.job", job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=env,
        start_new_session=True,
    )


def _converse(
    child: subprocess.Popen[bytes],
    job: str,
    options: Mapping[str, Any],
    on_event: Callable[[Event], None] | None,
    scratch: Sequence[Path],
    log: BinaryIO | Any,
) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    message = {"options": dict(options), "scratch": [str(path) for path in scratch]}
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(message).encode() + b"\n")
        child.stdin.flush()
    for line in child.stdout:
        event = json.loads(line)
        if "result" in event:
            result: dict[str, Any] = event["result"]
            return result
        if "error" in event:
            raise _rebuilt(event["error"])
        if on_event is not None:
            on_event(event)
        if "ask" in event:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(b"\n")
                child.stdin.flush()
    raise EngineError(f"the {job} process {_how_it_ended(child.wait())}{_last_words(log)}", "the input may be damaged")


def _rebuilt(error: Mapping[str, str]) -> HgError:
    kind = getattr(errors, error["kind"], Failed)
    return kind(error["what"], error["hint"]) if issubclass(kind, HgError) else Failed(error["what"], error["hint"])


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended early with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    return f"was stopped by signal {name}" + (" (most likely out of memory)" if name == "SIGKILL" else "")


def _last_words(log: BinaryIO | Any) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL))
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    telling = [line for line in lines if "ASSERT" in line or "rror" in line or "abort" in line.lower()]
    words = (telling or lines)[-1:]
    return f": {printable(words[0], limit=200)}" if words else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _StoppedError(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Lets `finally` run after SIGTERM, then dies of it as usual; only the main thread may do that."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(_number: int, _frame: object) -> NoReturn:
        raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _StoppedError:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# The child's side.


def main() -> None:
    """Entry of the child: reads one line of options, runs the job, writes events."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not look like an event
    lock, answered = threading.Lock(), threading.Semaphore(0)

    def send(event: Event) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(event).encode() + b"\n")
            out.flush()
        if "ask" in event:
            answered.acquire()

    message = json.loads(sys.stdin.buffer.readline() or b"{}")
    threading.Thread(target=_watch_parent, args=(message.get("scratch", []), answered), daemon=True).start()
    module, _, name = JOBS[sys.argv[1]].partition(":")
    try:
        job: Callable[[Mapping[str, Any], Send], dict[str, Any]] = getattr(importlib.import_module(module), name)
        send({"result": job(message["options"], send)})
    except HgError as error:
        send({"error": {"kind": type(error).__name__, "what": error.what, "hint": error.hint}})
    out.flush()
    os._exit(0)  # the engine's own teardown has nothing left to do, and can hang on worker threads


def _watch_parent(scratch: Sequence[str], answered: threading.Semaphore) -> None:
    while os.read(0, 4096):
        answered.release()
    for path in scratch:
        with contextlib.suppress(OSError):
            remove(Path(path))
    os._exit(1)


if __name__ == "__main__":
    main()
