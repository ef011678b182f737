"""The engine in a child process: checks files and counts bytes where an abort (GGML_ASSERT, 134) harms nobody.

One JSON request a line in, one JSON answer a line out. The child allocates no weights and no KV (no_alloc).
Invariant: whatever happens in the child, the caller gets an answer or an HgError, never a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..closing import Closing
from ..errors import DoesNotFit, EngineError, HgError, UsageError
from ..settings import BufferBytes, ContextSettings, ModelSettings, placement_of
from . import giving_up
from .library import BackendDevice

_TIMEOUT = 120.0  # seconds for one answer; a header of 256k tokens takes about one


class Child(Closing):
    """A running child. Its methods may be called many times; after a crash the next call starts another."""

    def __init__(self, rpc: Sequence[str] = (), timeout: float = _TIMEOUT) -> None:
        self._rpc = tuple(rpc)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, path: Path) -> str | None:
        """Loads header and vocabulary of `path`. The problem in one sentence, or None when the engine takes it."""
        try:
            self._ask({"do": "check", "path": os.fspath(path)})
        except HgError as error:
            return error.what
        return None

    def memory(self, path: Path, model: ModelSettings, context: ContextSettings) -> tuple[BufferBytes, ...]:
        """Exact bytes by buffer type that opening `path` would allocate. Raises EngineError when that fails."""
        answer = self._ask({"do": "bytes", "path": os.fspath(path), "model": asdict(model), "context": asdict(context)})
        return tuple(BufferBytes(**entry) for entry in answer["buffers"])

    def count_tokens(self, path: Path, text: str) -> int:
        """Tokens of `text` in the vocabulary of `path`. Raises EngineError when the engine does not take the file."""
        return int(self._ask({"do": "count", "path": os.fspath(path), "text": text})["tokens"])

    def devices(self) -> tuple[BackendDevice, ...]:
        """The devices that the engine sees, RPC servers included. Raises EngineError when one does not answer."""
        answer = self._ask({"do": "devices", "path": "the list of devices"})
        return tuple(BackendDevice(**entry) for entry in answer["devices"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self._timeout)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            raise self._crashed(request["path"])
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kinds: dict[int, type[HgError]] = {kind.exit_code: kind for kind in (UsageError, DoesNotFit)}
            raise kinds.get(answer.get("exit_code", 1), EngineError)(answer["error"], answer.get("hint", ""))
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: a file named numpy.py in the folder one happens to stand in must not be imported.
        command = [sys.executable, "-P", "-m", "hybridgen_gguf.engine.child", *self._rpc]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def _crashed(self, path: str) -> EngineError:
        process, self._process = self._process, None
        assert process is not None
        alive = process.poll() is None
        try:
            code = process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        text = process.stderr.read().decode("utf-8", "replace") if process.stderr else ""
        _close(process)
        if alive and code == -signal.SIGKILL:
            return EngineError(f"the engine gave no answer about {path} within {self._timeout:.0f} s")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if "pthread_create failed" in text or "Resource temporarily unavailable" in text:
            return EngineError("the engine could not start its threads", "raise the limit on processes (ulimit -u)")
        why = f": {cause}" if (cause := giving_up.reason(text)) else ""
        return EngineError(f"the engine crashed on {path} ({how}{why})", "the file is damaged or hostile")

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def check_loads(path: Path) -> str | None:
    """One check in a child of its own: the problem in one sentence, or None."""
    with Child() as child:
        return child.check(path)


# --- inside the child ---

_walked: set[Path] = set()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from .handles import Context, Model, start

    path = Path(request["path"])
    if request["do"] == "devices":
        return {"devices": [asdict(device) for device in start().devices()]}
    if request["do"] == "count":
        with Model(path, ModelSettings(), vocab_only=True) as model:
            return {"tokens": len(model.tokenize(request["text"].encode("utf-8"), False, False))}
    if request["do"] == "check":
        with Model(path, ModelSettings(), no_alloc=True) as model:
            model.walk_vocabulary()
            return {}
    model_settings, context_settings = settings_from(request)
    with Model(path, model_settings, no_alloc=True) as model, Context(model, context_settings) as context:
        if path not in _walked:
            model.walk_vocabulary()
            _walked.add(path)
        return {"buffers": [asdict(entry) for entry in context.memory_use()]}


def settings_from(request: dict[str, Any]) -> tuple[ModelSettings, ContextSettings]:
    """The settings of a request that came as JSON."""
    model, context = (_with_placement(request[name]) for name in ("model", "context"))
    return ModelSettings(**model), ContextSettings(**context)


def _with_placement(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"placement": placement_of(settings["placement"])}


def main(rpc: Sequence[str]) -> None:
    from .handles import start

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["GGML_NO_BACKTRACE"] = "1"  # an abort would start a debugger
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    started = False
    for line in sys.stdin.buffer:
        try:
            if not started:
                library = start()
                for endpoint in rpc:
                    library.add_rpc(endpoint)
                started = True
            answer = _answer(json.loads(line))
        except HgError as error:
            answer = {"error": error.what, "hint": error.hint, "exit_code": error.exit_code}
        except Exception as error:  # a fault of ours must not look like a damaged file
            answer = {"error": f"internal error {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
