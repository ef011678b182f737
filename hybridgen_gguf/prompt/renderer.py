"""Rendering a chat template where it can do no harm, as often as it takes to find the form that the template wants.

Knows no tokens and no model. Invariant: no template is ever parsed or rendered in this process; a child process does it
under limits on time, memory and output (see render_child.py), so that a hostile template costs at most `RenderLimits`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import processes
from ..closing import Closing
from ..errors import Failed, TemplateError, UsageError
from ..units import format_size
from .fitting import write
from .forms import Conversation, Form, Refusal
from .messages import Message
from .probes import Style, style_of

_START_SECONDS = 20.0  # for starting Python on a loaded machine; the template's own time is counted after that
_END_SECONDS = 5.0
_HINT = "use --raw for no template, or --chat-template with a name such as chatml"


@dataclass(frozen=True)
class RenderLimits:
    """What rendering may cost: wall-clock `seconds`; bytes of text, of memory beyond Python's own, and of template.

    The text may have `output_bytes` at most and, as tokenizing takes time too, `own_bytes` and 8 times the request.
    """

    seconds: float = 2.0
    output_bytes: int = 64 << 20
    own_bytes: int = 256 << 10
    memory_bytes: int = 512 << 20
    template_bytes: int = 1 << 20

    def text_bytes(self, request_bytes: int) -> int:
        """What a request of so many bytes may become."""
        return min(self.output_bytes, self.own_bytes + 8 * request_bytes)


@dataclass(frozen=True)
class Rendered:
    """The text; whether the system message had to be moved into the first user message; what of the conversation the
    template lost (empty: nothing); what it wrote after the conversation's last text."""

    text: str
    system_folded: bool
    lost: str = ""
    tail: str = ""


@dataclass(frozen=True)
class RenderRequest:
    """What a template sees. `tools`: functions as in OpenAI's API; `variables` are further names (`enable_thinking`);
    `now` fixes `strftime_now`. What is not given is not defined in the template."""

    template: str
    messages: Sequence[Message | Mapping[str, Any]]
    bos_token: str = ""
    eos_token: str = ""
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    now: datetime | None = None


def _folders_of(*modules: str) -> list[str]:
    """Where the modules lie; found, not imported. The child gets these and no other part of sys.path."""
    specs = [importlib.util.find_spec(module) for module in modules]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    return list(dict.fromkeys(str(Path(place).resolve().parent) for place in places))


class Renderer(Closing):
    """A child process that is ready to render one template. Start it early: it loads Jinja while the model loads.

    Use as a context manager, or call `close`; it serves one template, and all its renderings share the time of one.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        """Starts the process. Raises TemplateError if that is impossible."""
        self._limits = limits or RenderLimits()
        self._template: str | None = None
        self._form: Form | None = None
        self._late: threading.Timer | None = None
        child = Path(__file__).with_name("render_child.py")
        try:
            self._process = processes.start_script(child, json.dumps(_folders_of("jinja2", "markupsafe")))
        except Failed as error:
            raise TemplateError(f"the chat template cannot be rendered: {error.what}", error.hint) from None

    def close(self) -> None:
        """Ends the process if it still runs. May be called more than once."""
        if self._late is not None:
            self._late.cancel()
        # With a template it has nothing more to do, and ends; without, it still waits for one.
        processes.end(self._process, 0.0 if self._template is None else 1.0)

    def render(self, request: RenderRequest) -> Rendered:
        """The conversation as text, in the form that the template wants. Raises TemplateError for a template that does
        not parse, fails, refuses or costs too much, and UsageError for variables that JSON cannot hold."""
        messages = tuple(Message.of(message) for message in request.messages)
        given = Conversation(messages, tuple(request.tools), request.variables)
        mark = f"Q{secrets.token_hex(4)}"
        made = write(given, lambda m, v: self._ask(request, m, v), mark, request.template)
        self._form = made.form
        return Rendered(made.text, made.form.folded, made.lost, made.tail)

    def style(self, request: RenderRequest) -> Style:
        """How the template ends turns and marks thoughts; what cannot be found out is left empty. For the template and
        variables of `request`, in the form that its messages were rendered in."""

        def render(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
            return self._ask(request, messages, variables)

        mark = f"Q{secrets.token_hex(4)}"
        return style_of(render, request.template, mark, self._form or Form(), request.variables)

    def _ask(self, request: RenderRequest, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """One rendering. Raises Refusal where the template refuses or fails, TemplateError for everything else."""
        everything = {
            "bos_token": request.bos_token,
            "eos_token": request.eos_token,
            "add_generation_prompt": request.add_generation_prompt,
            **variables,
        }
        try:
            line = json.dumps({"messages": messages, "variables": everything})
            most = self._limits.text_bytes(len(line))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"a variable for the chat template cannot be written as JSON: {error}") from None
        try:
            self._start(request)
            self._send(f'{line[:-1]}, "output_bytes": {most}}}\n')
            outcome, payload = self._answer(most)
        except OSError:
            raise self._died() from None
        if outcome == "ok":
            return payload
        raise self._problem(outcome, payload, most)

    def _start(self, request: RenderRequest) -> None:
        """Hands the template over, once."""
        if self._template is not None:
            if request.template != self._template:
                raise ValueError("a Renderer serves one template")
            return
        if len(request.template.encode("utf-8", "surrogatepass")) > self._limits.template_bytes:
            raise TemplateError(f"the chat template is larger than {self._limits.template_bytes >> 20} MiB", _HINT)
        self._template = request.template
        self._late = threading.Timer(self._limits.seconds + _START_SECONDS, self._process.kill)
        self._late.daemon = True
        self._late.start()
        given = {
            "template": request.template,
            "now": request.now.isoformat() if request.now else None,
            "seconds": self._limits.seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
        self._send(json.dumps(given) + "\n")

    def _send(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None  # opened with PIPE
        pipe.write(line.encode("ascii"))
        pipe.flush()

    def _answer(self, most: int) -> tuple[str, str]:
        pipe = self._process.stdout
        assert pipe is not None  # opened with PIPE
        outcome, _, size = pipe.readline(64).decode("ascii", "replace").strip().partition(" ")
        length = int(size) if size.isdigit() else -1
        if not 0 <= length <= most:
            raise BrokenPipeError
        payload = pipe.read(length)
        if len(payload) < length:
            raise BrokenPipeError
        return outcome, payload.decode("utf-8", "surrogatepass")

    def _problem(self, outcome: str, text: str, most: int) -> TemplateError:
        refusals = {
            "refused": f"the chat template refuses these messages: {_one_line(text)}",
            "failed": f"the chat template fails: {_one_line(text)}",
        }
        if outcome in refusals:
            return Refusal(refusals[outcome], _HINT)
        sentences = {
            "memory": f"the chat template needs more than {self._limits.memory_bytes >> 20} MiB of memory",
            "size": f"the chat template writes more than {format_size(most)} of text",
            "syntax": f"the chat template does not parse: {_one_line(text)}",
            "unsafe": f"the chat template does what the sandbox forbids: {_one_line(text)}",
        }
        return TemplateError(sentences.get(outcome, "the chat template gave no answer"), _HINT)

    def _died(self) -> TemplateError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)  # it ends by a signal of the kernel's, which says why
        self.close()
        code = self._process.returncode
        names = ("SIGALRM", "SIGXCPU", "SIGKILL")
        if -code in {getattr(signal, name) for name in names if hasattr(signal, name)}:
            return TemplateError(f"the chat template takes longer than {self._limits.seconds:g} s", _HINT)
        return TemplateError(f"the process that renders the chat template ended with status {code}", _HINT)


def _one_line(text: str) -> str:
    """A stranger's message, made fit for a terminal: one line, printable, short."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(line.split())[:200]


def render_chat(request: RenderRequest, limits: RenderLimits | None = None) -> Rendered:
    """Renders at once, in a process started now. Errors as `Renderer.render`."""
    with Renderer(limits) as renderer:
        return renderer.render(request)
