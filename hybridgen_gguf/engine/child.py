"""The engine in a child process: checks files and counts bytes where an abort (GGML_ASSERT, 134) harms nobody.

One JSON request a line in, one JSON answer a line out. The child allocates no weights and no KV (no_alloc).
Invariant: whatever happens in the child, the caller gets an answer or an HgError, never a signal.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import processes
from ..closing import Closing
from ..errors import EngineError, HgError, UsageError
from ..settings import BufferBytes, ContextSettings, ModelSettings, context_settings_of, model_settings_of
from . import giving_up, refusals
from .library import BackendDevice

_GRAMMAR_SECONDS, _GRAMMAR_BYTES = 20, 1 << 30  # for compiling a grammar; those that people write take milliseconds
_NO_FILE = "the list of devices"
_TIMEOUT = 120.0  # seconds for one answer; a header of 256k tokens takes about one


class Child(Closing):
    """A running child. Its methods may be called many times; after a crash the next call starts another."""

    def __init__(self, rpc: Sequence[str] = (), timeout: float = _TIMEOUT) -> None:
        self._rpc = tuple(rpc)
        self._timeout = timeout
        self._process: processes.Child | None = None
        self._log: Any = None
        self.overridden: tuple[str, ...] = ()  # keys of --override-kv that the engine used when `memory` was asked

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
        self.overridden = tuple(answer["overridden"])
        return tuple(BufferBytes(**entry) for entry in answer["buffers"])

    def count_tokens(self, path: Path, text: str, *, add_special: bool = False) -> int:
        """Tokens of `text` in the vocabulary of `path`. Raises EngineError when the engine does not take the file."""
        asked = {"do": "count", "path": os.fspath(path), "text": text, "add_special": add_special}
        return int(self._ask(asked)["tokens"])

    def devices(self) -> tuple[BackendDevice, ...]:
        """The devices that the engine sees, RPC servers included. Raises EngineError when one does not answer."""
        answer = self._ask({"do": "devices", "path": _NO_FILE})
        return tuple(BackendDevice(**entry) for entry in answer["devices"])

    def grammar(self, path: Path, text: str, *, is_schema: bool) -> tuple[str, str]:
        """The grammar that `text` is, or that its JSON schema stands for, compiled once for the vocabulary of `path`;
        and what the converter left out of the schema, in its words.

        Raises UsageError in the engine's words, and for a text that costs the child more than its limits.
        """
        answer = self._hear({"do": "grammar", "path": os.fspath(path), "text": text, "is_schema": is_schema})
        if answer is None:
            self._died(os.fspath(path))
            raise UsageError("too deep or too complex", "simplify it")
        incomplete = re.search(r"conversion was incomplete: (.*)", processes.last_words(self._log))
        return str(_checked(answer)["grammar"]), incomplete[1] if incomplete else ""

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._hear(request)
        if answer is None:
            raise self._died(request["path"])
        return _checked(answer)

    def _hear(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None from a child that gave none."""
        if self._process is None:
            self._log = processes.open_log()
            try:
                self._process = processes.start("hybridgen_gguf.engine.child", *self._rpc, log=self._log)
            except BaseException:
                self._log.close()
                raise
        processes.say(self._process, request)
        return processes.hear(self._process, self._timeout)

    def _died(self, path: str) -> HgError:
        """Why there was no answer; the next question starts another child."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        hung = process.poll() is None and not select.select([process.stdout], [], [], 0)[0]
        code = processes.end(process, 0.0 if hung else 2.0)
        words = processes.last_words(self._log)
        self._log.close()
        if hung:
            return EngineError(f"the engine gave no answer about {path} within {self._timeout:.0f} s")
        if known := processes.death("the engine", code, words):
            return known
        how = processes.signal_name(code) or f"exit code {code}"
        how = f"signal {how}" if how.startswith("SIG") else how
        reason = giving_up.reason(words)
        why = f": {reason}" if reason else ""
        hint = "build the engine again: scripts/setup" if path == _NO_FILE else refusals.abort_hint(reason)
        return EngineError(f"the engine crashed on {path} ({how}{why})", hint)

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            processes.end(process, 5.0)
            self._log.close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise processes.unpacked(answer["error"])
    return answer


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
            return {"tokens": len(model.tokenize(request["text"].encode("utf-8"), request["add_special"], False))}
    if request["do"] == "grammar":
        return {"grammar": _compiled(path, request["text"], request["is_schema"])}
    if request["do"] == "check":
        with Model(path, ModelSettings(), no_alloc=True) as model:
            model.walk_vocabulary()
            return {}
    model_settings, context_settings = settings_from(request)
    with Model(path, model_settings, no_alloc=True) as model, Context(model, context_settings) as context:
        if path not in _walked:
            model.walk_vocabulary()
            _walked.add(path)
        return {"buffers": [asdict(e) for e in context.memory_use()], "overridden": model.overridden}


def _compiled(path: Path, text: str, is_schema: bool) -> str:
    from .grammar import Grammar, grammar_of_schema
    from .handles import Model, start

    with Model(path, ModelSettings(), vocab_only=True) as model:
        _limit_resources()
        grammar = grammar_of_schema(start(), text) if is_schema else text
        with Grammar(model, grammar) as compiled:
            compiled.allowed(None)  # the first question shows most grammars that are too complex
    return grammar


def _limit_resources() -> None:
    """For a text of the user's: so much more processor time and memory than was used until now."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _GRAMMAR_SECONDS
    _lower(resource.RLIMIT_CPU, seconds)
    _lower(resource.RLIMIT_DATA, _GRAMMAR_BYTES + 1024 * used.ru_maxrss)


def _lower(limit: int, value: int) -> None:
    import resource

    soft, hard = resource.getrlimit(limit)
    known = [number for number in (value, soft, hard) if number != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(known), hard))


def settings_from(request: dict[str, Any]) -> tuple[ModelSettings, ContextSettings]:
    """The settings of a request that came as JSON."""
    return model_settings_of(request["model"]), context_settings_of(request["context"])


def main(rpc: Sequence[str]) -> None:
    from .handles import start

    answers = processes.serve()
    os.environ["GGML_NO_BACKTRACE"] = "1"  # an abort would start a debugger
    started = False
    for line in sys.stdin.buffer:
        try:
            if not started:
                library = start()
                for endpoint in rpc:
                    library.add_rpc(endpoint)
                started = True
            answer = _answer(json.loads(line))
        except Exception as error:
            answer = {"error": processes.packed(processes.error_of(error))}
        answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
