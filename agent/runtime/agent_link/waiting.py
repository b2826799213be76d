"""Tells what this process's training thread waits for: other ranks, or its own loader's next batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

LONG_WAIT_S: Final = 60.0
LONG_WAIT_RATIO: Final = 3.0
"""A wait for a batch is reported after LONG_WAIT_S, or after this many times the longest wait so far."""


class Waiting:
    """A `with` block around each wait for others, one in another as may be.

    Waits of the main thread count, and of threads that Python did not start: autograd runs the hooks of a backward pass
    on CUDA in a thread of its own while the main thread waits for it. Atoll's own threads hold up no training."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        if _trains():
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _trains():
            self._depth -= 1


def _trains() -> bool:
    """Return whether the current thread runs the script or a part of its backward pass."""
    current = threading.current_thread()
    return current is threading.main_thread() or isinstance(current, threading._DummyThread)


waiting: Final = Waiting()
"""The process's state of waiting for other ranks."""


class BatchWait:
    """The training thread's wait for a batch. The link's thread asks for a report, for the training thread sends none.

    Before the first step nothing else says that a loader hangs: the agent has no step times to compare with."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._what = ""
        self._reported = False
        self._longest_s = 0.0

    @contextmanager
    def begun(self, what: str) -> Iterator[None]:
        """Surround the wait. what: the batch and where it comes from, for the report."""
        self._what, self._reported, self._begun_s = what, False, time.monotonic()
        try:
            yield
        finally:
            self._longest_s = max(self._longest_s, self.waited_s(time.monotonic()))
            self._begun_s = None

    def waited_s(self, now_s: float) -> float:
        """Return how long the wait under way has lasted; 0 without one."""
        begun_s = self._begun_s
        return 0.0 if begun_s is None else now_s - begun_s

    def report(self, now_s: float) -> str | None:
        """Describe a long wait, once."""
        waited_s = self.waited_s(now_s)
        if self._reported or waited_s <= max(LONG_WAIT_S, LONG_WAIT_RATIO * self._longest_s):
            return None
        self._reported = True
        return f"no batch for {waited_s:.0f} s: {self._what}"


batch_wait: Final = BatchWait()
"""The process's time of waiting for batches."""
