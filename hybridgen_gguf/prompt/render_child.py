"""Renders one chat template in a process of its own, then ends. Run by path, with `-I -S`; imports nothing of ours.

A template in a model file is a stranger's program. Jinja's sandbox keeps it from Python's objects, but not from
`'x' * 30000000000` or 90,000 x 90,000 loops, which no Python-level hook can interrupt; the kernel's limits can.

argv[1]: JSON list, the folders jinja2 may be imported from. stdin: one JSON request. stdout: a line with the outcome,
then UTF-8 text (the rendered text, or the reason). Invariant: the template is not looked at before the limits are set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Reply = tuple[str, str]


def main() -> None:
    """Reads a request, writes a reply; killed by the kernel at the time limit."""
    sys.path[:0] = json.loads(sys.argv[1])
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  before the limits: a slow disk is not the template's fault

    request = json.loads(sys.stdin.buffer.read())
    _set_limits(request["seconds"], request["memory_bytes"])
    outcome, text = _reply(request)
    payload = text.encode("utf-8", "surrogatepass")
    if len(payload) > request["output_bytes"]:
        outcome, payload = "size", b""
    sys.stdout.buffer.write(outcome.encode() + b"\n" + payload)
    sys.stdout.buffer.flush()


def _set_limits(seconds: float, memory_bytes: int) -> None:
    # SIGALRM's default action ends the process whatever Python is busy with.
    import signal

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGXCPU})
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        import resource
    except ImportError:  # Windows: the parent's time limit alone
        return
    limits = {
        resource.RLIMIT_AS: _mapped_bytes() + memory_bytes,
        resource.RLIMIT_CPU: int(resource.getrusage(resource.RUSAGE_SELF).ru_utime + seconds) + 2,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        limits[resource.RLIMIT_NPROC] = 0
    for limit, value in limits.items():
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # a lower hard limit is in force already
            pass


def _mapped_bytes() -> int:
    import os

    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  pathlib costs 8 ms here
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 256 << 20


def _reply(request: dict[str, Any]) -> Reply:
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    try:
        return _render_with_system(request)
    except MemoryError:
        return "memory", ""
    except RecursionError:
        return "failed", "it nests or calls itself too deeply"
    except TooLargeError:
        return "size", ""
    except TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except SecurityError as error:
        return "unsafe", str(error)
    except RefusedError as error:
        return "refused", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


class RefusedError(Exception):
    """The template called raise_exception."""


class TooLargeError(Exception):
    """The text is over the limit."""


def _render_with_system(request: dict[str, Any]) -> Reply:
    """Renders; a system message that the template refuses or drops goes before the first user message instead."""
    messages = request["messages"]
    folded = _fold_system(messages)
    if folded is None:
        return "ok", _render(request, messages)
    try:
        text = _render(request, messages)
    except RefusedError as refusal:
        try:
            return "folded", _render(request, folded)
        except RefusedError:
            raise refusal from None
    if messages[0]["content"].strip() in text:
        return "ok", text
    retried = _render(request, folded)
    return ("folded", retried) if messages[0]["content"].strip() in retried else ("ok", text)


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    content = messages[0]["content"].strip() + "\n\n" + messages[1]["content"]
    return [{**messages[1], "content": content}, *messages[2:]]


def _render(request: dict[str, Any], messages: list[dict[str, str]]) -> str:
    template = _environment(request["now"]).from_string(request["template"])
    parts: list[str] = []
    size = 0
    for part in template.generate(**{**request["variables"], "messages": messages}):
        size += len(part)
        if size > request["output_bytes"]:
            raise TooLargeError
        parts.append(part)
    return "".join(parts)


def _environment(now: str | None) -> Any:
    """What chat templates on the Hugging Face Hub expect: trimmed blocks, loop controls and a few functions."""
    from datetime import datetime

    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what training looks at; here its body is simply part of the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise RefusedError(str(message))

    def strftime_now(form: str) -> str:
        return (datetime.fromisoformat(now) if now else datetime.now()).strftime(form)

    def tojson(
        value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


if __name__ == "__main__":
    main()
