"""Guards the moments in which model and optimizer are between two steps, so that nobody saves half an update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Consistency:
    """Held by the training thread from the start of optimizer.step() until the next boundary is done.

    Whoever else wants to read the state (the link thread, when training is stuck) takes it with a deadline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._training_thread_holds = False

    def begin_update(self) -> None:
        """By the training thread; again is harmless. Waits while another thread saves: that one ends the process."""
        if not self._training_thread_holds:
            self._lock.acquire()
            self._training_thread_holds = True

    def end_update(self) -> None:
        if self._training_thread_holds:
            self._training_thread_holds = False
            self._lock.release()

    @contextmanager
    def frozen(self, timeout_s: float) -> Iterator[bool]:
        """By another thread: whether the state may be read, after at most `timeout_s`."""
        taken = self._lock.acquire(timeout=timeout_s)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()
