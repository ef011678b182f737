"""How a command line ends early: a signal at any moment leaves a whole terminal and no child, within a second.

A signal acts as Ctrl-C does, whatever it was: `finally` clauses run, and the process then dies of it. A thread that the
C part of Python's handler wakes, whatever the main thread does, kills the children at once; when the main thread has
not ended in time (a step of the engine, a pipe that nobody reads), or a second signal comes, it ends the process.
Invariant: what the parent process had ignored (nohup, `&` in a script) stays ignored.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from types import FrameType
from typing import NoReturn

from .. import processes
from . import show

INTERRUPTED = 130
_PATIENCE = 0.8  # seconds that clearing up may take
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_came: list[int] = []  # signals that end the process, in their order, as the watching thread sees them
_handled: list[int] = []  # the same but Ctrl-C, as the main thread sees them


def listen() -> None:
    """Called once, in the main thread, before work begins."""
    numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    bell, ring = socket.socketpair()
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    for number in heard:
        if number != signal.SIGINT:  # its handler is Python's own, or that of `run`, and is called for the others
            signal.signal(number, _as_ctrl_c)
    if hasattr(signal, "SIGTSTP") and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _pause)
    threading.Thread(target=_watch, args=(bell, ring, frozenset(map(int, heard))), daemon=True).start()


def came() -> bool:
    """Whether a signal is ending this process: what fails from then on is no error."""
    return bool(_came or _handled)


def leave(code: int) -> NoReturn:
    """Ends the process: with `code`, or by the signal that came, so that its parent sees which."""
    if not (_came or _handled):
        sys.exit(code)
    show.restore_terminal()
    try:
        sys.stdout.flush()  # who does not read it is not waited for: see _watch
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    number = (_handled or _came)[0]
    if number == signal.SIGINT:
        os._exit(INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    _handled.append(number)
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _pause(_number: int, _frame: FrameType | None) -> None:
    """Ctrl-Z: the shell gets its cursor back. A bar that goes on later leaves it visible."""
    show.restore_terminal()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _pause)


def _watch(bell: socket.socket, _ring: socket.socket, heard: frozenset[int]) -> None:
    """`_ring`: kept open here, as long as signals write to it."""
    while True:
        if _came and not select.select([bell], [], [], _PATIENCE)[0]:
            break
        numbers = [number for number in bell.recv(64) if number in heard]
        second = bool(_came) or len(numbers) > 1
        _came.extend(numbers)
        if numbers:
            processes.kill_all()
            if second:
                break
    show.restore_terminal()
    os._exit(128 + _came[0])
