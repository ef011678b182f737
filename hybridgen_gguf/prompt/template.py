"""Chat templates: which one to use, and rendering it where it can do no harm. Knows messages as plain dicts; knows no
tokens and no model.

Invariant: no template is ever parsed or rendered in this process; a child process does it under limits on time, memory
and output (see render_child.py), so that a hostile template costs at most `RenderLimits`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..closing import Closing
from ..errors import BadFile, NotFound, TemplateError, UsageError
from ..units import format_size

_FOLDER = Path(__file__).parent / "templates"
_START_SECONDS = 20.0  # for starting Python on a loaded machine; the template's own time is counted after that
_HINT = "use --raw for no template, or --chat-template with a name such as chatml"
BUILT_IN = (
    "chatml", "gemma", "llama2", "llama3", "llama4", "mistral", "phi3", "phi4", "plain", "vicuna", "zephyr",
)  # fmt: skip
# A model with these and without a template was fine-tuned for chat; other families have theirs in base models too.
_CHATML = ("<|im_start|>", "<|im_end|>")


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
class ChatTemplate:
    """A Jinja `source` and where it is from: `the model`, `built-in chatml`, `the command line`, or a file's path."""

    source: str
    origin: str


@dataclass(frozen=True)
class Rendered:
    """The text, and whether the system message had to be moved into the first user message."""

    text: str
    system_folded: bool


@dataclass(frozen=True)
class RenderRequest:
    """What a template sees. `variables` are further names (`tools`, `enable_thinking`); `now` fixes `strftime_now`."""

    template: str
    messages: Sequence[Mapping[str, str]]
    bos_token: str = ""
    eos_token: str = ""
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None


def built_in(name: str) -> ChatTemplate:
    """A template that comes with the program; `name` is one of BUILT_IN."""
    source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return ChatTemplate(source, f"built-in {name}")


def choose_template(option: str | None, of_model: str | None, vocabulary: Container[str]) -> ChatTemplate:
    """The template to use: the user's `option` (a built-in name, Jinja text, or a file), else the model's own, else
    `chatml` if its control tokens are in `vocabulary`, else `plain` (one user message: its text alone, as for a base
    model; several: `role: content` lines).

    Raises UsageError for an unknown name, NotFound and BadFile for a file.
    """
    if option is not None:
        return _from_option(option)
    if of_model is not None and of_model.strip():
        return ChatTemplate(of_model, "the model")
    return built_in("chatml" if all(token in vocabulary for token in _CHATML) else "plain")


def _from_option(option: str) -> ChatTemplate:
    if option in BUILT_IN:
        return built_in(option)
    if "{{" in option or "{%" in option:
        text = option.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # whatever the locale made of it
        return ChatTemplate(text, "the command line")
    path = Path(option)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return ChatTemplate(_read(path), str(path))
    if path.suffix or os.sep in option:
        raise NotFound(f"there is no template file '{option}'", "give a file, or one of " + ", ".join(BUILT_IN))
    near = difflib.get_close_matches(option, BUILT_IN, 1)
    what = f"'{option}' is neither a built-in chat template nor a file"
    raise UsageError(what, f"did you mean {near[0]}?" if near else "built in are " + ", ".join(BUILT_IN))


def _read(path: Path) -> str:
    limit = RenderLimits().template_bytes
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise BadFile(f"the chat template {path} is larger than {limit >> 20} MiB", "is it the right file?")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(f"the chat template {path} is not UTF-8 text", "is it the right file?") from None
    except OSError as error:
        raise NotFound(f"the chat template {path} cannot be read: {error.strerror}") from None


def _folders_of(*modules: str) -> list[str]:
    """Where the modules lie; found, not imported. The child gets these and no other part of sys.path."""
    specs = [importlib.util.find_spec(module) for module in modules]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    return list(dict.fromkeys(str(Path(place).resolve().parent) for place in places))


class Renderer(Closing):
    """A child process that is ready to render one template. Start it early: it loads Jinja while the model loads.

    Use as a context manager, or call `close`; `render` works once.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        """Starts the process. Raises TemplateError if that is impossible."""
        self._limits = limits or RenderLimits()
        child = Path(__file__).with_name("render_child.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(child), json.dumps(_folders_of("jinja2", "markupsafe"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},
                start_new_session=True,  # Ctrl-C is for the parent to handle
            )
        except OSError as error:
            raise TemplateError(f"no process could be started to render the chat template: {error}", _HINT) from None

    def close(self) -> None:
        """Ends the process if it still runs. May be called more than once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def render(self, request: RenderRequest) -> Rendered:
        """The text. Raises TemplateError for a template that does not parse, fails, refuses or costs too much, and
        UsageError for variables that JSON cannot hold."""
        if len(request.template.encode("utf-8", "surrogatepass")) > self._limits.template_bytes:
            raise TemplateError(f"the chat template is larger than {self._limits.template_bytes >> 20} MiB", _HINT)
        try:
            message, most = self._message(request)
            output, _ = self._process.communicate(message, self._limits.seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._too_slow() from None
        finally:
            self.close()
        outcome, separator, payload = output.partition(b"\n")
        if not separator:
            raise self._died(self._process.returncode)
        return self._result(outcome.decode("ascii", "replace"), payload.decode("utf-8", "surrogatepass"), most)

    def _message(self, request: RenderRequest) -> tuple[bytes, int]:
        """The request as the child reads it, and the bytes of text that it may become."""
        variables = {
            "tools": None,
            "documents": None,
            "bos_token": request.bos_token,
            "eos_token": request.eos_token,
            "add_generation_prompt": request.add_generation_prompt,
            **request.variables,
        }
        given = {"messages": [dict(message) for message in request.messages], "variables": variables}
        try:
            most = self._limits.text_bytes(len(json.dumps(given)))
            message = {
                **given,
                "template": request.template,
                "now": request.now.isoformat() if request.now else None,
                "seconds": self._limits.seconds,
                "memory_bytes": self._limits.memory_bytes,
                "output_bytes": most,
            }
            return json.dumps(message).encode("ascii"), most
        except (TypeError, ValueError) as error:
            raise UsageError(f"a variable for the chat template cannot be written as JSON: {error}") from None

    def _result(self, outcome: str, text: str, most: int) -> Rendered:
        if outcome in ("ok", "folded"):
            return Rendered(text, outcome == "folded")
        sentences = {
            "memory": f"the chat template needs more than {self._limits.memory_bytes >> 20} MiB of memory",
            "size": f"the chat template writes more than {format_size(most)} of text",
            "syntax": f"the chat template does not parse: {_one_line(text)}",
            "unsafe": f"the chat template does what the sandbox forbids: {_one_line(text)}",
            "refused": f"the chat template refuses these messages: {_one_line(text)}",
            "failed": f"the chat template fails: {_one_line(text)}",
        }
        raise TemplateError(sentences.get(outcome, "the chat template gave no answer"), _HINT)

    def _too_slow(self) -> TemplateError:
        return TemplateError(f"the chat template takes longer than {self._limits.seconds:g} s", _HINT)

    def _died(self, code: int) -> TemplateError:
        names = ("SIGALRM", "SIGXCPU", "SIGKILL")
        if -code in {getattr(signal, name) for name in names if hasattr(signal, name)}:
            return self._too_slow()
        return TemplateError(f"the process that renders the chat template ended with status {code}", _HINT)


def _one_line(text: str) -> str:
    """A stranger's message, made fit for a terminal: one line, printable, short."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(line.split())[:200]


def render_chat(request: RenderRequest, limits: RenderLimits | None = None) -> Rendered:
    """Renders at once, in a process started now. Errors as `Renderer.render`."""
    with Renderer(limits) as renderer:
        return renderer.render(request)
