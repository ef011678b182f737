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
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .. import processes
from ..engine import giving_up, refusals
from ..errors import EngineError, HgError
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
    with processes.open_log() as log, stoppable():
        # Threads that spin while they wait take the cores from others; a batch loses nothing by sleeping.
        env = {"OMP_WAIT_POLICY": "passive", **os.environ, **(environment or {}), "PYTHONUTF8": "1"}
        child = processes.start("hybridgen_gguf.make.job", job, log=log, environment=env)
        try:
            return _converse(child, job, options, on_event, scratch=scratch, log=log)
        except BaseException:
            for path in scratch:
                remove(path)
            raise
        finally:
            processes.end(child)


def _converse(
    child: processes.Child,
    job: str,
    options: Mapping[str, Any],
    on_event: Callable[[Event], None] | None,
    *,
    scratch: Sequence[Path],
    log: BinaryIO | Any,
) -> dict[str, Any]:
    processes.say(child, {"options": dict(options), "scratch": [str(path) for path in scratch]})
    while (event := processes.hear(child)) is not None:
        if "result" in event:
            result: dict[str, Any] = event["result"]
            return result
        if "error" in event:
            raise processes.unpacked(event["error"])
        if on_event is not None:
            on_event(event)
        if "ask" in event:
            processes.say(child, {})
    raise _died(job, child.wait(), processes.last_words(log))


def _died(job: str, code: int, words: str) -> HgError:
    who = f"the {job} process"
    if known := processes.death(who, code, words):
        return known
    name = processes.signal_name(code)
    how = f"was stopped by signal {name}" if name else f"ended early with status {code}"
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    reason = giving_up.reason(words)
    last = reason or printable("".join(lines[-1:]), limit=200)
    hint = refusals.abort_hint(reason) if name or reason else refusals.OURS.hint
    return EngineError(f"{who} {how}{': ' if last else ''}{last}", hint)


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
    out = processes.serve()
    lock, answered = threading.Lock(), threading.Semaphore(0)

    def send(event: Event) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(event).encode() + b"\n")
        if "ask" in event:
            answered.acquire()

    message = json.loads(sys.stdin.buffer.readline() or b"{}")
    threading.Thread(target=_watch_parent, args=(message.get("scratch", []), answered), daemon=True).start()
    module, _, name = JOBS[sys.argv[1]].partition(":")
    try:
        job: Callable[[Mapping[str, Any], Send], dict[str, Any]] = getattr(importlib.import_module(module), name)
        send({"result": job(message["options"], send)})
    except Exception as error:
        send({"error": processes.packed(processes.error_of(error))})
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
