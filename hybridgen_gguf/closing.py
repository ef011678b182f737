"""`with` for everything that has a `close`. Knows nothing else.

Invariant: `close` is called once at the end of the block, whatever happened inside; it may be called again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Base of what is opened and closed."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
