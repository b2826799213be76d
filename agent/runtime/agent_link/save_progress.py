"""Counts what this process has saved of checkpoints, and what of its state changed hands: a worker whose bytes move is
waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final


class SaveProgress:
    """Counted up by whoever writes, told to the agent by the link's thread. By any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers = 0
        self._bytes = 0
        self.peer_bytes = 0
        """Of other ranks, for whose last checkpoint this one waits."""
        self.handed_bytes = 0
        """That went to other ranks, or came from them, where the run's members change. By the training thread."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a checkpoint is being written."""
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def add(self, count: int) -> None:
        """Count bytes that were written, or sent to the object store."""
        with self._lock:
            self._bytes += count

    @property
    def saving(self) -> bool:
        return self._writers > 0

    @property
    def own_bytes(self) -> int:
        return self._bytes


progress: Final = SaveProgress()
"""The process's counter of saved bytes."""
