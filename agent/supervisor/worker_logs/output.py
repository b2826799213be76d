"""Read the output of all workers of this node, on one thread, as fast as they print it."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import fcntl
from typing import Final

from atoll.agent.supervisor.worker_logs.spool import Spool

logger = logging.getLogger(__name__)

_F_SETPIPE_SZ: Final = 1031
_PIPE_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
_FLUSH_S: Final = 0.2


BURST_BYTES: Final = 8 * 1024 * 1024
RATE_BYTES_PER_S: Final = 2 * 1024 * 1024
TAIL_BYTES: Final = 64 * 1024
_RESUME_BYTES: Final = 4 * TAIL_BYTES


class OutputLimiter:
    """Token bucket that passes BURST_BYTES at once and RATE_BYTES_PER_S in the long run. It keeps the end of dropped
    output, which says why a program failed, and counts the dropped bytes."""

    def __init__(self, now_s: float) -> None:
        self._allowed = float(BURST_BYTES)
        self._at_s = now_s
        self._dropped = 0
        self._tail = bytearray()

    def take(self, data: bytes, now_s: float) -> bytes:
        """Return the bytes to keep now; the rest may come with a later call."""
        self._refill(now_s)
        resumed = self.flush(now_s) if self._allowed >= _RESUME_BYTES else b""
        if self._dropped or self._tail:
            self._hold(data)
            return resumed
        kept = data[: int(self._allowed)]
        self._allowed -= len(kept)
        self._hold(data[len(kept) :])
        return resumed + kept

    def flush(self, now_s: float) -> bytes:
        """Return the withheld bytes after a line that counts the dropped ones. Call it when output pauses or ends."""
        self._refill(now_s)
        if not self._dropped and not self._tail:
            return b""
        tail = bytes(self._tail)
        if self._dropped:
            begins = tail.find(b"\n") + 1  # whole lines where there are any
            tail, self._dropped = tail[begins:], self._dropped + begins
        kept = dropped_line(self._dropped) + tail if self._dropped else tail
        self._tail.clear()
        self._dropped = 0
        self._allowed = max(0.0, self._allowed - len(kept))
        return kept

    def lost(self, count: int) -> None:
        """Count bytes that could not be written (disk full); the next written output reports them."""
        self._dropped += count

    def _hold(self, data: bytes) -> None:
        self._tail += data[-TAIL_BYTES:]
        surplus = max(0, len(self._tail) - TAIL_BYTES)
        del self._tail[:surplus]
        self._dropped += surplus + max(0, len(data) - TAIL_BYTES)

    def _refill(self, now_s: float) -> None:
        self._allowed = min(BURST_BYTES, self._allowed + (now_s - self._at_s) * RATE_BYTES_PER_S)
        self._at_s = now_s


def dropped_line(count: int) -> bytes:
    """Return the line that replaces `count` dropped bytes."""
    amount = f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"
    return f"\n… {amount} of output dropped …\n".encode()


class Captured:
    """One worker's output pipe and its destination. Touched by the thread alone until `ended`."""

    def __init__(self, fd: int, spool: Spool, on_data: Callable[[], None], on_end: Callable[[], None]) -> None:
        """on_data, on_end: called on the thread."""
        self.fd = fd
        self.spool = spool
        self.on_data = on_data
        self.on_end = on_end
        self.recent = bytearray()
        """The last printed bytes, dropped or not."""
        self._gate = OutputLimiter(time.monotonic())
        self._told_full = False

    def read(self) -> bool:
        """Read what is there. Return False at the end."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self.recent += data[-TAIL_BYTES:]
        del self.recent[:-TAIL_BYTES]
        self._keep(self._gate.take(data, time.monotonic()) if data else b"")
        return bool(data)

    def flush(self) -> None:
        self._keep(self._gate.flush(time.monotonic()))

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        before = self.spool.end
        try:
            self.spool.append(data)
        except OSError as error:
            self._gate.lost(len(data) - (self.spool.end - before))
            if not self._told_full:
                logger.warning("output of a worker cannot be kept: %s. Free space in the state directory", error)
            self._told_full = True
        if self.spool.end > before:
            self.on_data()


class OutputPump:
    """Thread that reads output pipes. It owns each one from `add` until its end, `cut` or `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._asked: list[tuple[str, Captured]] = []
        self._closing = False
        self._wake_fd, self._waker_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="atoll-output")
        self._thread.start()

    def add(self, captured: Captured) -> None:
        with suppress(OSError):  # beyond the user's limit: the default size is only slower
            fcntl(captured.fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._ask("add", captured)

    def cut(self, captured: Captured) -> None:
        """End a pipe that another process still holds open. No effect after its end."""
        self._ask("cut", captured)

    def close(self) -> None:
        """End all and join the thread."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            raise RuntimeError("the output thread hangs: a disk does not answer")
        self._selector.close()
        os.close(self._wake_fd)
        os.close(self._waker_fd)

    def _ask(self, what: str, captured: Captured) -> None:
        with self._lock:
            self._asked.append((what, captured))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: it will wake
            os.write(self._waker_fd, b"w")

    def _run(self) -> None:
        flushed_s = time.monotonic()
        while True:
            for key, _ in self._selector.select(_FLUSH_S):
                if isinstance(key.data, Captured):
                    if not key.data.read():
                        self._end(key.data)
                else:
                    os.read(self._wake_fd, 4096)
            if time.monotonic() - flushed_s >= _FLUSH_S:
                flushed_s = time.monotonic()
                self._flush_quiet()
            with self._lock:
                asked, self._asked = self._asked, []
                closing = self._closing
            for what, captured in asked:
                self._carry_out(what, captured)
            if closing:
                for captured in self._all():
                    self._end(captured)
                return

    def _carry_out(self, what: str, captured: Captured) -> None:
        if what == "add":
            self._selector.register(captured.fd, selectors.EVENT_READ, captured)
        elif captured in self._all():
            self._end(captured)

    def _flush_quiet(self) -> None:
        busy = {key.fd for key, _ in self._selector.select(0)}
        for captured in self._all():
            if captured.fd not in busy:
                captured.flush()

    def _all(self) -> list[Captured]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Captured)]

    def _end(self, captured: Captured) -> None:
        captured.flush()
        self._selector.unregister(captured.fd)
        os.close(captured.fd)
        captured.on_end()
