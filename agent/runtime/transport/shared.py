"""Shared memory from one worker to another of the same node: a ring in anonymous memory (memfd).

The receiver opens it through /proc/PID/fd, which the kernel allows to the same user only. It has no name in any file
system, so nothing is left of it when both processes are gone, however they went."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Final

_OFFER: Final = struct.Struct("<IIQ16s")  # process, its descriptor, bytes of the ring, token
OFFER_BYTES: Final = _OFFER.size
MAX_RING_BYTES: Final = 1 << 30
PLACE: Final = struct.Struct("<Q")  # of a payload: its position, counted from the ring's first byte ever written
_TOKEN_BYTES: Final = 16
# The first page: the token, then two words on cache lines of their own, both written by the receiver.
_PAGE_BYTES: Final = 4096
_ACCEPTED: Final = 64 // 8
_RELEASED: Final = 128 // 8  # all before this position has been copied out
_LINE_BYTES: Final = 64
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a ring that shrank would be a SIGBUS


@dataclass(slots=True)
class _Mapped:
    """ring: bytes [size]; words: uint64 [512], the first page."""

    map: mmap.mmap
    ring: memoryview
    words: memoryview

    @staticmethod
    def of(descriptor: int, ring_bytes: int) -> _Mapped:
        map = mmap.mmap(descriptor, _PAGE_BYTES + ring_bytes)
        whole = memoryview(map)
        return _Mapped(map, whole[_PAGE_BYTES:], whole[:_PAGE_BYTES].cast("Q"))

    def close(self) -> None:
        self.ring.release()
        self.words.release()
        with contextlib.suppress(BufferError):  # a reader of this process still looks at it; it goes with the last one
            self.map.close()


class Arena:
    """The sender's end. Not thread-safe; close() is idempotent."""

    def __init__(self, ring_bytes: int) -> None:
        """ring_bytes: a multiple of the page size, at most 1 GiB. Memory is taken as it is first written."""
        self._ring_bytes = ring_bytes
        self._head = 0
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create("atoll-wire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, _PAGE_BYTES + ring_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(self._descriptor, token, 0)
            self._mapped: _Mapped | None = _Mapped.of(self._descriptor, ring_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.offer = _OFFER.pack(os.getpid(), self._descriptor, ring_bytes, token)

    @property
    def accepted(self) -> bool:
        return self._mapped is not None and self._mapped.words[_ACCEPTED] == 1

    def put(self, payload: bytes | memoryview) -> int | None:
        """Copy a payload in; its position, or None where there is no room just now (or the receiver talks nonsense)."""
        if not self.accepted or self._mapped is None:
            return None
        length = len(payload)
        position = self._head
        if position % self._ring_bytes + length > self._ring_bytes:
            position += self._ring_bytes - position % self._ring_bytes  # never over the edge
        end = position + _lines(length)
        released = int(self._mapped.words[_RELEASED])
        if not (released <= self._head and end - released <= self._ring_bytes):
            return None
        start = position % self._ring_bytes
        self._mapped.ring[start : start + length] = payload
        self._head = end
        return position

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
            os.close(self._descriptor)


class ArenaView:
    """The receiver's end. Not thread-safe; close() is idempotent."""

    def __init__(self, mapped: _Mapped, ring_bytes: int) -> None:
        self._mapped: _Mapped | None = mapped
        self._ring_bytes = ring_bytes
        self._next = 0

    @staticmethod
    def open(offer: bytes) -> ArenaView | None:
        """Accept the arena that a peer offers; None where it cannot be had (another container or user): the sender then
        sends everything inline."""
        if len(offer) != OFFER_BYTES:
            return None
        process, descriptor, ring_bytes, token = _OFFER.unpack(offer)
        if not (0 < ring_bytes <= MAX_RING_BYTES and ring_bytes % _PAGE_BYTES == 0):
            return None
        try:
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                return None
            if os.fstat(opened).st_size != _PAGE_BYTES + ring_bytes or os.pread(opened, _TOKEN_BYTES, 0) != token:
                return None  # the process that offered is gone, and its number is another's
            mapped = _Mapped.of(opened, ring_bytes)
        except OSError:
            return None
        finally:
            os.close(opened)
        mapped.words[_ACCEPTED] = 1
        return ArenaView(mapped, ring_bytes)

    def take(self, position: int, length: int) -> bytes | None:
        """Copy a payload out and give its room back; None where no payload can lie there."""
        start = position % self._ring_bytes
        if self._mapped is None or position < self._next or start + length > self._ring_bytes:
            return None
        payload = bytes(self._mapped.ring[start : start + length])
        self._next = position + _lines(length)
        # Behind the copy also for the sender: its processor sees an aligned word change at once or not at all, and the
        # checksum would find what a reordering let through.
        self._mapped.words[_RELEASED] = self._next
        return payload

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _lines(length: int) -> int:
    return -(-length // _LINE_BYTES) * _LINE_BYTES
