"""Tells whether this process's training thread waits for other ranks: whoever waits is not the one that hangs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final


class Waiting:
    """A `with` block around each wait for others, one in another as may be. What other threads wait for holds nobody
    up: theirs do not count."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1


waiting: Final = Waiting()
"""Of this process."""
