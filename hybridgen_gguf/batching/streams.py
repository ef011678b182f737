"""What a caller holds of a running request: its chunks, as an iterator for threads and for asyncio.

Knows no engine. Invariant: a stream that is closed, cancelled or forgotten gives its cells back after the step that
runs then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import HgError
from ..reply import Chunk

if TYPE_CHECKING:
    import asyncio  # 40 ms that a program without an event loop need not wait for


class Inbox:
    """Items from the engine's thread. `wake`: called after an item came, while somebody waits in an event loop."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Any] = SimpleQueue()
        self.waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, item: Any) -> None:
        """On the engine's thread, or on any."""
        self.items.put(item)


class Stream(Iterator[Chunk], AsyncIterator[Chunk]):
    """Chunks of an answer; the last one has its reply. For `for` and for `async for`, in one of them at a time."""

    def __init__(self, inbox: Inbox, cancel: Callable[[], None]) -> None:
        self._inbox, self._cancel = inbox, cancel
        self._done = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        return self._taken(self._inbox.items.get())

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        import asyncio

        if self._done:
            raise StopAsyncIteration
        try:
            while True:
                if self._inbox.waiting is None:
                    self._inbox.waiting = asyncio.get_running_loop(), asyncio.Event()
                event = self._inbox.waiting[1]
                event.clear()
                try:
                    return self._taken(self._inbox.items.get_nowait())
                except Empty:
                    await event.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    def _taken(self, item: Any) -> Chunk:
        if isinstance(item, HgError):
            self._done = True
            raise item
        chunk: Chunk = item
        self._done = chunk.reply is not None
        return chunk

    def close(self) -> None:
        """Ends the request if it still runs; no more chunks come. May be called from any thread, and again."""
        if not self._done:
            self._done = True
            self._cancel()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
