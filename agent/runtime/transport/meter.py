"""Counts what a link carried, how long it was busy, and what of it was dropped."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# struct tcp_info of Linux: bytes_acked and bytes_received (4.1), busy_time in microseconds (4.10)
_TCP_INFO_BYTES: Final = 176
_BYTES_ACKED: Final = struct.Struct("<120xQQ32xQ")
_WINDOW_BYTES: Final = 64 * 1024  # a window that carried less tells of delay, not of bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounts:
    """One direct peer, counted from the start of the run. Bytes are those of headers and payloads."""

    rank: int
    bytes_sent: int
    bytes_left: int
    """Bytes acknowledged by the peer's kernel, where it counts them, with encryption and framing. ZeroMQ takes a
    message at once, for which a thin link needs seconds."""
    bytes_received: int
    bytes_shared: int
    """Bytes of bytes_sent that went through shared memory."""
    frames_sent: int
    frames_received: int
    busy_s: float
    """Time with bytes waiting to leave, or on their way and not acknowledged."""
    goodput_bps: float
    """Bits per second that left while busy; 0 until 64 KiB left at a stretch."""
    dropped: Mapping[str, int]
    """Frames from this peer that were not used, by reason."""


@dataclass(frozen=True, slots=True)
class LinksInUse:
    """State of the connections to other islands."""

    waits: bool
    """Something waits to leave, or is on its way and not acknowledged."""
    busy_s: Mapping[int, float]
    """Busy seconds by peer since the run began; empty if this rank has no connection to another island."""
    left_bytes: int = 0
    """Acknowledged bytes to all of them since the run began."""
    beyond: frozenset[int] = frozenset()
    """Ranks of other islands: what goes to them takes the same link."""


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """The kernel's counters of one connection."""

    waiting_bytes: int  # written and not acknowledged (TCP) or not read (Unix)
    acked_bytes: int | None  # None: not TCP
    received_bytes: int = 0
    busy_s: float = 0.0


def kernel_counts(connection: socket.socket) -> KernelCounts:
    """Raises OSError where the connection is gone."""
    waiting = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
    if connection.family == socket.AF_UNIX:
        return KernelCounts(waiting[0], None)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return KernelCounts(waiting[0], None)
    acked, received, busy_us = _BYTES_ACKED.unpack(info)
    return KernelCounts(waiting[0], acked, received, busy_us / 1e6)


@dataclass(slots=True)
class Meter:
    """Written by the wire's thread alone; others may read."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_shared: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    busy_s: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)
    _busy_since_s: float | None = None
    _seen_bytes: int = 0
    _seen_busy_s: float = 0.0
    _good_bytes: int = 0
    _good_s: float = 0.0
    _kernel_clock: bool = False

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def busy(self, busy: bool, now_s: float) -> None:
        """Something waits to leave, or nothing any more, as far as this process can see."""
        if self._kernel_clock:
            return
        if self._busy_since_s is not None:
            self.busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if busy else None

    def sample(self, counts: KernelCounts | None) -> None:
        """Close a window. With the kernel's own counts of the connection, bytes and busy time are those."""
        left_bytes = self.bytes_sent
        if counts is not None and counts.acked_bytes is not None:
            self._kernel_clock = True
            left_bytes, self.busy_s = counts.acked_bytes, counts.busy_s
        moved_bytes, moved_s = left_bytes - self._seen_bytes, self.busy_s - self._seen_busy_s
        self._seen_bytes, self._seen_busy_s = left_bytes, self.busy_s
        if moved_bytes >= _WINDOW_BYTES:
            self._good_bytes += moved_bytes
            self._good_s += moved_s

    def end(self) -> None:
        """Count what was sent as left: the connection was closed after all of it.

        The last window was read before the kernel had the last acknowledgements."""
        self._seen_bytes = max(self._seen_bytes, self.bytes_sent - self.bytes_shared)

    @property
    def goodput_bytes_per_s(self) -> float:
        return self._good_bytes / self._good_s if self._good_s > 0 else 0.0

    def link(self, rank: int) -> LinkCounts:
        return LinkCounts(
            rank=rank,
            bytes_sent=self.bytes_sent,
            bytes_left=self._seen_bytes if self._kernel_clock else self.bytes_sent,
            bytes_received=self.bytes_received,
            bytes_shared=self.bytes_shared,
            frames_sent=self.frames_sent,
            frames_received=self.frames_received,
            busy_s=self.busy_s,
            goodput_bps=8 * self.goodput_bytes_per_s,
            dropped=dict(self.dropped),
        )
