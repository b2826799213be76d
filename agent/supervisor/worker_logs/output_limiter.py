"""Limit the kept output of a worker that prints too fast. Pure: time is an argument."""

from __future__ import annotations

from typing import Final

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
