"""Joins two connections: what one end sends goes to the other through a pipe of the kernel, in both directions.

No byte is copied into this process, and no more than a pipe's worth waits in it, and as much unsent in the kernel.
Where one end does not read, the other is not read from, and TCP slows it down. What is urgent stands behind that
alone."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

PIPE_BYTES: Final = 256 * 1024
"""Buffer of each direction of a link, in bytes; the relay holds no more of it."""
_TCP_NOTSENT_LOWAT: Final = 25  # <netinet/tcp.h>; the socket module lacks it
_AT_ONCE: Final = 1024 * 1024
_LOOK_S: Final = 5.0
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class _Direction:
    """Bytes from `source` to `sink`, on the event loop."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, moved: Callable[[int], None], ended: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._moved, self._ended = moved, ended
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # this user's pipes hold as much as they may: a smaller one serves
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        if sink.family != socket.AF_UNIX:
            sink.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, PIPE_BYTES)
        self._held = 0
        self._reading = self._writing = self._over = False
        self.done = False
        self._read(True)

    def close(self) -> None:
        if self._in >= 0:
            self._read(False)
            self._write(False)
            os.close(self._in)
            os.close(self._out)
            self._in = self._out = -1

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._source, self._fill)
            else:
                self._loop.remove_reader(self._source)

    def _write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._sink, self._drain)
            else:
                self._loop.remove_writer(self._sink)

    def _fill(self) -> None:
        try:
            taken = os.splice(self._source.fileno(), self._in, _AT_ONCE, flags=_FLAGS)
        except BlockingIOError:
            if self._held:  # the pipe is full: go on when there is room
                self._read(False)
            return
        except OSError:
            self._ended()
            return
        if taken == 0:
            self._over = True
            self._read(False)
        self._held += taken
        self._drain()

    def _drain(self) -> None:
        try:
            while self._held:
                given = os.splice(self._out, self._sink.fileno(), self._held, flags=_FLAGS)
                self._held -= given
                self._moved(given)
        except BlockingIOError:
            self._write(True)
            return
        except OSError:
            self._ended()
            return
        self._write(False)
        if not self._over:
            self._read(True)
            return
        self.done = True
        with suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        self._ended()


async def join(one: socket.socket, other: socket.socket, *, idle_s: float, moved: Callable[[int, int], None]) -> None:
    """Forward until both ends have closed, either fails, or no byte passed for idle_s; then close both.

    moved: called with (0 for bytes of `one`, 1 for `other`; bytes) as they leave."""
    over = asyncio.Event()
    last_s = time.monotonic()
    directions: list[_Direction] = []

    def passed(way: int, count: int) -> None:
        nonlocal last_s
        last_s = time.monotonic()
        moved(way, count)

    def ended(way: int) -> None:
        if not directions[way].done or all(each.done for each in directions):
            over.set()

    try:
        for way, (source, sink) in enumerate(((one, other), (other, one))):
            directions.append(
                _Direction(source, sink, lambda count, way=way: passed(way, count), lambda way=way: ended(way))  # type: ignore[misc]
            )
        while not over.is_set() and time.monotonic() - last_s < idle_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, idle_s)):
                    await over.wait()
    finally:
        for direction in directions:
            direction.close()
        one.close()
        other.close()
