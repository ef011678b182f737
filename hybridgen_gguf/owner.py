"""One owner at a time for what cannot be shared: threads, interleaved streams, forks, the interpreter's end.

A request that runs to its end by itself is waited for; a stream that its reader holds open is not, since it may never
go on: the second request is refused. Knows nothing of models.
Invariant: two requests never touch the thing at once, and nothing touches it after it was closed or in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from .errors import Busy, UsageError

T = TypeVar("T")
_AT_EXIT_S = 5.0  # a step of the largest model may take seconds; longer than this the exit is not held up


class Owner:
    """Who may use one thing. `what` names it in messages; `release` gives back what it holds, once."""

    def __init__(self, what: str, release: Callable[[], None], stop: Callable[[], None] = lambda: None) -> None:
        """`stop` is called first when it is closed: a thread that `works` on it ends after its step."""
        self._what, self._release, self._stop = what, release, stop
        self._pid = os.getpid()
        self._changed = threading.Condition()  # of an RLock: a stream may be collected while this thread holds it
        self._holder: object = None
        self._waited_for: int | None = None  # the thread of a holder that ends by itself
        self._readers = 0
        self._step = threading.RLock()  # held while a request really runs, not while its reader thinks
        self.closing = False
        _living.add(self)

    def check(self) -> None:
        """Raises UsageError in a forked child and after `close`."""
        if os.getpid() != self._pid:
            raise UsageError(f"the {self._what} was loaded in another process", f"load the {self._what} after the fork")
        if self.closing:
            raise UsageError(f"the {self._what} is closed", "load it again")

    def requests(self, chunks: Iterator[T], *, to_the_end: bool) -> Iterator[T]:
        """`chunks` with the thing to themselves. `to_the_end`: the reader takes all at once, so others may wait.

        Raises Busy while another stream is open.
        """
        holder = object()
        self._take(holder, to_the_end)
        try:
            while True:
                with self._step:
                    self.check()
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                yield chunk
        finally:
            if os.getpid() == self._pid:
                with self._step:
                    close = getattr(chunks, "close", None)
                    if close is not None:
                        close()
                self._give(holder)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what changes nothing: any number at once, and beside a request; `close` waits for them."""
        self.check()  # before the lock, which a forked child may find taken
        with self._changed:
            self.check()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around a step of a thread that has the thing to itself. Raises UsageError after `close`."""
        with self._step:
            self.check()
            yield

    def _take(self, holder: object, to_the_end: bool) -> None:
        self.check()
        with self._changed:
            while self._holder is not None:
                if self._waited_for in (None, threading.get_ident()):
                    hint = "read it to its end or close it first, or load the model a second time"
                    raise Busy(f"the {self._what} is busy: another stream of it is open", hint)
                self._changed.wait()
                self.check()
            self._holder = holder
            self._waited_for = threading.get_ident() if to_the_end else None

    def _give(self, holder: object) -> None:
        with self._changed:
            if self._holder is holder:
                self._holder = self._waited_for = None
                self._changed.notify_all()

    def close(self, wait_s: float = -1.0) -> None:
        """Ends what runs (requests ask `closing`), waits for its step and releases; in a forked child nothing.

        `wait_s`: at most so long; -1: until it has ended. Called again it does nothing.
        """
        if os.getpid() != self._pid or self.closing:
            return
        with self._changed:
            self.closing = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._readers, None if wait_s < 0 else wait_s):
                return
        self._stop()
        if not self._step.acquire(timeout=wait_s):
            return
        try:
            self._release()
        finally:
            self._step.release()
            with self._changed:
                self._changed.notify_all()


_living: weakref.WeakSet[Owner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the libraries' own destructors run under a daemon thread that still computes."""
    for owner in list(_living):
        owner.close(_AT_EXIT_S)
