"""Tells whether a peer answers, on a link however thin."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.agent.runtime.transport.meter import KernelCounts


@dataclass(slots=True)
class Pulse:
    """A heartbeat leaves behind what was written before it. On a thin link, or one that lost most of its bandwidth just
    now, that is more than the link carries in the time that a peer may be silent: silence counts from when all of it
    was delivered.

    A heartbeat leaves every `interval_s`. Every byte that comes is an answer: on this connection the peer sends nothing
    else."""

    interval_s: float
    patience_s: float
    """Seconds to wait for an answer once the heartbeat is there."""
    _heard_bytes: int = -1
    _heard_s: float = 0.0
    _due_bytes: int | None = None  # acknowledged, these tell that a heartbeat after the last answer was delivered
    _delivered_s: float = 0.0
    _asked_s: float = 0.0

    def silent(self, counts: KernelCounts, behind_bytes: int, now_s: float) -> bool:
        """Several times a second, with what the kernel says. behind_bytes: what may stand before a heartbeat and is not
        in the kernel yet."""
        if counts.acked_bytes is None:
            return False
        stood_still = now_s - self._asked_s > self.interval_s  # this process did: answers may wait to be read
        self._asked_s = now_s
        if counts.received_bytes != self._heard_bytes or stood_still:
            self._heard_bytes, self._heard_s = counts.received_bytes, now_s
            self._due_bytes = None
        elif self._due_bytes is None and now_s - self._heard_s > self.interval_s:
            self._due_bytes = counts.acked_bytes + counts.waiting_bytes + behind_bytes
            self._delivered_s = now_s
        delivered = self._due_bytes is not None and (counts.acked_bytes >= self._due_bytes or counts.waiting_bytes == 0)
        if not delivered:
            self._delivered_s = now_s
        return now_s - self._delivered_s > self.patience_s
