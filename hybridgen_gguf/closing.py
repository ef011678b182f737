"""`with` for everything that has a `close`. Knows nothing else.

Invariant: `close` is called once at the end of the block, whatever happened inside; it may be called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Base of what is opened and closed."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
