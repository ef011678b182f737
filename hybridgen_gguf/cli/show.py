"""What a person sees: errors, warnings, statistics and progress on stderr; tables on stdout. Knows no engine.

Invariant: stdout gets only what was asked for; control characters and bars go to terminals alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import HgError
from ..units import format_size

if TYPE_CHECKING:
    from ..plan import Plan
    from ..reply import Reply


_LEAST_LAST_COLUMN = 20


def prepare_streams() -> None:
    """UTF-8 on stdout and stderr whatever the locale; what cannot be encoded becomes a mark, never an exception.

    A closed stream is replaced, or the next file opened would take its number and get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDONLY if name != "stderr" else os.O_WRONLY)  # takes the lowest free number
            if name != "stdin":  # writing to a stdout that was closed fails, as it does elsewhere
                setattr(sys, name, os.fdopen(number, "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    warnings.showwarning = lambda message, *_: warning(str(message))


def error(problem: HgError) -> None:
    """`error: what` and `hint: what to do`, each on one line."""
    note(f"error: {problem.what}")
    if problem.hint:
        note(f"hint: {problem.hint}")


def last_error(problem: HgError) -> None:
    """As `error`, before the process ends without clearing up: a bar is erased and the cursor shown again."""
    restore_terminal(erase=True)
    error(problem)


def restore_terminal(*, erase: bool = False) -> None:
    """Shows the cursor that a bar had hidden; `erase`: clears the bar's line. Takes no lock and waits for nobody."""
    with contextlib.suppress(OSError, ValueError):
        if os.isatty(2) and os.environ.get("TERM") != "dumb" and select.select([], [2], [], 0)[1]:
            os.write(2, b"\r\x1b[2K\x1b[?25h" if erase else b"\x1b[?25h")


def warning(text: str) -> None:
    note(f"warning: {text}")


def note(text: str) -> None:
    """One line on stderr; lost, and no error, when nobody can read it."""
    try:
        print(_one_line(text), file=sys.stderr, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def answer(text: str, *, styled: bool = False) -> None:
    """A piece of the answer, at once; `styled`: with our own colours. Raises BrokenPipeError when nobody reads."""
    sys.stdout.write(_harmless(text) if sys.stdout.isatty() and not styled else text)
    sys.stdout.flush()


class Thoughts:
    """What a model thinks before it answers: dimmed on a terminal, and nothing of it in what a pipe gets."""

    def __init__(self, *, to_stderr: bool) -> None:
        """`to_stderr`: where stdout is no terminal, to stderr instead of nowhere."""
        self._terminal = sys.stdout.isatty()
        self._to_stderr = to_stderr
        self._styled = self._terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        self._open = False

    def show(self, text: str) -> None:
        """A piece of the thoughts, at once."""
        if not text or not (self._terminal or self._to_stderr):
            return
        self._open = True
        if not self._terminal:
            self._write_stderr(text)
        else:
            answer(f"\x1b[2m{_harmless(text)}\x1b[22m" if self._styled else _harmless(text), styled=True)

    def end(self, text: str) -> None:
        """An empty line before `text`, the beginning of the answer, if there were thoughts."""
        if self._open and text:
            self._open = False
            if self._terminal:
                answer("\n\n")
            else:
                self._write_stderr("\n")

    def _write_stderr(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(_harmless(text) if sys.stderr.isatty() else text)
            sys.stderr.flush()


def _harmless(text: str) -> str:
    """A model may write escape sequences; a terminal must not obey them."""
    return "".join(c if (c >= " " and c != "\x7f") or c in "\n\t" else "�" for c in text)


def data(value: Any) -> None:
    """One JSON document on stdout."""
    answer(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def statistics(reply: Reply) -> None:
    """One line on stderr after an answer."""
    usage, timings = reply.usage, reply.timings
    prefill = f" at {timings.prompt_tps:.1f} tokens/s" if timings.prompt_tps else ""
    decode = f" at {timings.decode_tps:.1f} tokens/s" if timings.decode_tps else ""
    reused = f" ({usage.reused_tokens} reused)" if usage.reused_tokens else ""
    parts = (
        f"prompt {usage.prompt_tokens} tokens{reused}{prefill}",
        f"answer {usage.completion_tokens} tokens{decode}",
        f"seed {reply.seed}",
        reply.finish_reason,
    )
    note(f"[{' · '.join(parts)}]")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """A table on stdout. `right`: columns aligned to the right. On a narrow terminal the last column folds."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        last = index == len(columns) - 1
        grid.add_column(column, justify="right" if index in right else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    cells = [columns, *rows]
    fixed = sum(2 + max(cell_len(str(row[index])) for row in cells) for index in range(len(columns) - 1))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)
    console.width = max(console.width, fixed + _LEAST_LAST_COLUMN)
    with console.capture() as drawn:
        console.print(grid)
    answer("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()), styled=True)


def plan(made: Plan, *, explain: bool) -> None:
    """The plan as a table; with `explain` each number's reason."""
    rows: list[tuple[object, ...]] = [
        (use.device, format_size(use.weights), format_size(use.kv), format_size(use.compute), format_size(use.total))
        for use in made.memory
    ]
    table("", ("memory", "weights", "KV", "scratch", "total"), rows, right=(1, 2, 3, 4))
    cells = f"{made.kv.cells_device} on the device, {made.kv.cells_host} on the host"
    answer(
        f"\nlayers on the GPU  {made.model.n_gpu_layers} of {made.n_layers + 1}\n"
        f"context            {made.context.n_ctx} tokens, KV {made.context.type_k}/{made.context.type_v}: {cells}\n"
        f"threads            {made.context.threads} for decode, {made.context.threads_batch} for prefill\n"
        f"batch              {made.context.n_batch}, computed {made.context.n_ubatch} at a time\n"
    )
    if explain:
        answer("\n")
        table("why", ("what", "value", "because"), [(r.name, r.value, r.why) for r in made.reasons])


def plan_notes(made: Plan) -> None:
    """The plan's numbers with their reasons, a line each, on stderr."""
    for reason in made.reasons:
        note(f"{reason.name}: {reason.value} ({reason.why})")


def tier_notes(reply: Reply) -> None:
    """What each side of a KV cache in two memories did, a line on stderr."""
    if (tiers := reply.tiers) is None:
        return
    steps = max(tiers.steps_tiered, 1)
    note(
        f"kv tiers: {tiers.cells_device} cells on the device, {tiers.cells_host} in RAM; a step read "
        f"{format_size(tiers.bytes_device // max(tiers.steps, 1))} and {format_size(tiers.bytes_host // steps)}, "
        f"the CPU worked {tiers.cpu_s / steps * 1e3:.2f} ms and waited {tiers.wait_s / steps * 1e3:.2f} ms; "
        f"pinned {tiers.pinned}, 2 MiB pages {tiers.huge_pages}"
    )


@contextlib.contextmanager
def progress(what: str, *, sizes: bool = False, rate: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr if that is a terminal; called with (done, all). `sizes`: bytes, and no bar before the first.
    `rate`: called with a third word, which is shown behind the bar."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counter = DownloadColumn(binary_units=True) if sizes else MofNCompleteColumn()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn(), *(
            [TextColumn("{task.fields[rate]}")] if rate else []
        ),
        console=Console(file=sys.stderr), transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=None, rate="")

    def report(done: int, total: int, told: str = "") -> None:
        bar.start()
        bar.update(task, completed=done, total=total or None, rate=told)

    try:
        if not sizes:
            bar.start()
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


_SELDOM_S = 60.0  # between two lines about progress where there is no terminal


@contextlib.contextmanager
def lines_progress(what: str) -> Iterator[Callable[[int, int, int], None]]:
    """Progress of a file: called with (lines done, lines in all, tokens so far). A bar with rate and remaining time on
    a terminal, elsewhere a line on stderr once a minute."""
    started = shown = time.monotonic()
    first: int | None = None
    with progress(what, rate=True) as bar:

        def report(done: int, total: int, tokens: int) -> None:
            nonlocal shown, first
            now = time.monotonic()
            first = done - 1 if first is None else first
            rate = f"{tokens / max(now - started, 1e-9):.1f} tokens/s"
            if sys.stderr.isatty():
                bar(done, total, rate)
            elif now - shown > _SELDOM_S:
                shown = now
                left = (now - started) / max(done - first, 1) * (total - done)
                note(f"{done} of {total} lines, {rate}, about {left:.0f} s left")

        yield report


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, if that is a terminal; called with what comes next."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(what) as line:
        yield lambda text: line.update(f"{what}: {text}")


@contextlib.contextmanager
def stages(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """As `status`, called with (stage, done, all); `all` 0: without a share."""
    with status(what) as say:
        yield lambda stage, done, of: say(f"{stage} {100 * done // of} %" if of else stage)
