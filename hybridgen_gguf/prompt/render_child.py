"""Renders one chat template in a process of its own, as often as asked. Run by path, with `-I -S`; imports nothing of
ours.

A template in a model file is a stranger's program. Jinja's sandbox keeps it from Python's objects, but not from
`'x' * 30000000000` or 90,000 x 90,000 loops, which no Python-level hook can interrupt; the kernel's limits can.

argv[1]: JSON list, the folders jinja2 may be imported from. stdin: a line of JSON with the template and the limits,
then a line for each rendering (messages and variables). stdout: for each, a line with the outcome and the number of
bytes, then UTF-8 text (the rendered text, or the reason). Invariant: the template is not looked at before the limits
are set, and all renderings together have the time of one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

Reply = tuple[str, str]


def main() -> None:
    """Answers requests until there are no more; killed by the kernel at the time limit."""
    sys.path[:0] = json.loads(sys.argv[1])
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  before the limits: a slow disk is not the template's fault

    given = json.loads(_line())
    _set_limits(given["seconds"], given["memory_bytes"])
    outcome, template = _compiled(given)
    clock = _Clock(max(_ring_after(0), 1e-3))
    while request := sys.stdin.buffer.readline():
        asked = json.loads(request)
        with clock:
            answer = (outcome, template) if outcome else _reply(template, asked)
            payload = answer[1].encode("utf-8", "surrogatepass")
        if len(payload) > asked["output_bytes"]:
            answer, payload = ("size", ""), b""
        sys.stdout.buffer.write(b"%s %d\n" % (answer[0].encode(), len(payload)) + payload)
        sys.stdout.buffer.flush()


def _line() -> bytes:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(1)  # nobody asks
    return line


class _Clock:
    """The alarm rings only while a template works: the parent may think between two renderings."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def __enter__(self) -> None:
        _ring_after(self._left)

    def __exit__(self, *_: object) -> None:
        self._left = max(_ring_after(0), 1e-3)


def _ring_after(seconds: float) -> float:
    """Sets the alarm; what was left of it. Without alarms (Windows) the parent's time limit holds alone."""
    import signal

    return signal.setitimer(signal.ITIMER_REAL, seconds)[0] if hasattr(signal, "setitimer") else seconds


def _set_limits(seconds: float, memory_bytes: int) -> None:
    # SIGALRM's default action ends the process whatever Python is busy with.
    import signal

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGXCPU})
        signal.setitimer(signal.ITIMER_REAL, seconds)  # for parsing; `_Clock` goes on with what is left
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


def _compiled(given: dict[str, Any]) -> tuple[str, Any]:
    """("", the template), or an outcome and its reason."""
    return _caught(lambda: ("", _environment(given["now"]).from_string(given["template"])))


def _reply(template: Any, request: dict[str, Any]) -> Reply:
    return _caught(lambda: ("ok", _render(template, request)))


def _caught(work: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    try:
        return work()
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


def _render(template: Any, request: dict[str, Any]) -> str:
    given = {**request["variables"], "messages": request["messages"]}
    template.environment.given = _lists_in(given)
    variables = {**template.environment.absent, **given}
    parts: list[str] = []
    size = 0
    for part in template.generate(**variables):
        size += len(part)
        if size > request["output_bytes"]:
            raise TooLargeError
        parts.append(part)
    return "".join(parts)


def _lists_in(value: Any) -> set[int]:
    """Identities of all lists in the caller's data."""
    if isinstance(value, dict):
        return set().union(*(_lists_in(item) for item in value.values()))
    return {id(value)}.union(*(_lists_in(item) for item in value)) if isinstance(value, list) else set()


def _to_json(absent: type) -> Any:
    """The filter `tojson`: as in json.dumps, with lists for iterators and null for what is `absent`."""

    def tojson(
        value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        def other(part: object) -> object:  # what filters such as map give, and what is not there
            if isinstance(part, absent):
                return None
            if isinstance(part, Iterator):
                return list(part)
            raise TypeError(f"Object of type {type(part).__name__} is not JSON serializable")

        settings = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, default=other, **settings)

    return tojson


def _environment(now: str | None) -> Any:
    """What chat templates on the Hugging Face Hub expect: trimmed blocks, loop controls and a few functions."""
    from datetime import datetime

    from jinja2 import Undefined
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Absent(Undefined):
        """`tools` and `documents` where none are given: not defined, as templates that ask want it, and none for those
        that compare (the Hub's own library passes None)."""

        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return other is None or super().__eq__(other)

        __hash__ = Undefined.__hash__

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

    class Environment(ImmutableSandboxedEnvironment):
        """A template may change the lists that it made itself; some need to."""

        given: set[int]

        def is_safe_attribute(self, thing: Any, attribute: str, value: Any) -> bool:
            own = (
                type(thing) is list
                and attribute in ("append", "extend", "insert", "pop")
                and id(thing) not in self.given
            )
            return own or super().is_safe_attribute(thing, attribute, value)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json(Absent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.tests["none"] = lambda value: value is None or isinstance(value, Absent)
    environment.absent = {name: Absent(name=name) for name in ("tools", "documents")}  # type: ignore[attr-defined]
    return environment


if __name__ == "__main__":
    main()
