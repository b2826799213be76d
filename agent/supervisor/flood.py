"""Limits the output that is kept of a worker that prints more than anyone can read. Pure: time comes in."""

from __future__ import annotations

from typing import Final

BURST_BYTES: Final = 8 * 1024 * 1024
RATE_BYTES_PER_S: Final = 2 * 1024 * 1024
TAIL_BYTES: Final = 64 * 1024
_RESUME_BYTES: Final = 4 * TAIL_BYTES


class FloodGate:
    """Lets BURST_BYTES through at once and RATE_BYTES_PER_S in the long run. Of what it drops it keeps the end, which
    says why a program failed, and tells how much is missing."""

    def __init__(self, now_s: float) -> None:
        self._allowed = float(BURST_BYTES)
        self._at_s = now_s
        self._dropped = 0
        self._tail = bytearray()

    def take(self, data: bytes, now_s: float) -> bytes:
        """Returns what is to be kept now; the rest may come with a later call."""
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
        """The flood is over, or the output has ended: what was withheld, after a line that says what is missing."""
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
        """`count` bytes that were to be kept could not be (disk full): they are told with the next that can."""
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
    """The line that stands for `count` bytes of output."""
    amount = f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"
    return f"\n… {amount} of output dropped …\n".encode()
