"""Renders many conversations, from any thread, without a process for each.

A child serves one template and has the time of one rendering; this hands it some conversations and takes another child
in time. What a template tells about answers is found out once.
Invariant: a template gets no more time for a conversation than it would have alone, give or take what others left.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from types import TracebackType

from ..errors import TemplateError
from .probes import Style
from .renderer import Rendered, Renderer, RenderLimits, RenderRequest

_USES = 32  # renderings that a child is used for, and how many seconds it may live in all
_LIFE_S = 15.0  # below what the child's own clock allows (RenderLimits.seconds and its time to start)


class SharedRenderer:
    """Stands for a `Renderer` in `encode_chat`, any number of times. `close` ends its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Renderer | None = None
        self._template = ""
        self._uses, self._born = 0, 0.0
        self._styles: dict[str, Style] = {}

    def render(self, request: RenderRequest) -> Rendered:
        """As `Renderer.render`. A child that ended for want of time is replaced, and the rendering tried once more."""
        with self._lock:
            child, fresh = self._ready(request.template)
            try:
                return child.render(request)
            except TemplateError:
                self._end()
                if fresh:
                    raise
            return self._ready(request.template)[0].render(request)

    def style(self, request: RenderRequest) -> Style:
        """As `Renderer.style`, for the messages rendered last; found once for each template and set of variables."""
        key = json.dumps([request.template, request.variables, bool(request.tools)], default=str, sort_keys=True)
        with self._lock:
            if key not in self._styles:
                child, fresh = self._ready(request.template)
                if fresh:
                    child.render(replace(request))  # the form in which the messages were rendered is found again
                self._styles[key] = child.style(request)
            return self._styles[key]

    def _ready(self, template: str) -> tuple[Renderer, bool]:
        """A child for this template, and whether it has done nothing yet."""
        now = time.monotonic()
        worn = self._uses >= _USES or now - self._born > _LIFE_S
        if self._child is not None and (worn or self._template != template):
            self._end()
        fresh = self._child is None
        if self._child is None:
            self._child = Renderer(RenderLimits())
            self._template, self._uses, self._born = template, 0, now
        self._uses += 1
        return self._child, fresh

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """Ends the process. It may be used again."""
        with self._lock:
            self._end()

    def __enter__(self) -> SharedRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: `encode_chat` leaves it after each prompt, and the next goes on with the same process."""
