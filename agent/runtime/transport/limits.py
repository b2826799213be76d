"""Limits of a worker's links."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from atoll.agent.runtime.transport.shared import MAX_RING_BYTES
from atoll.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    silence_s: float = 10.0
    """A peer that answers no heartbeat, or takes no byte of what is on its way, for so long is lost, in seconds."""

    leave_s: float = 30.0
    """A peer for which something waits so long to leave is lost, though bytes do leave: its link is too thin for what
    is sent."""

    send_buffer_bytes: int = 256 * 1024 * 1024
    """Bytes waiting for one peer above which the engine's payloads are not taken. A peer with four times as many
    (and one payload) waiting, relayed from others, is lost."""

    shared_bytes: int = 8 * 1024 * 1024
    """Shared memory towards each worker of the same node, in bytes; 0: none."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.silence_s <= 3600:
            raise SettingError("silence_s", self.silence_s, "must lie between 0.1 and 3600", "Leave it out for 10")
        if not self.leave_s > 0:
            raise SettingError("leave_s", self.leave_s, "must be positive", "Leave it out for 30")
        if self.send_buffer_bytes < 1:
            raise SettingError("send_buffer_bytes", self.send_buffer_bytes, "must be positive", "Leave it out")
        if not (0 <= self.shared_bytes <= MAX_RING_BYTES and self.shared_bytes % mmap.PAGESIZE == 0):
            why = f"must be a multiple of {mmap.PAGESIZE} between 0 and {MAX_RING_BYTES}"
            raise SettingError("shared_bytes", self.shared_bytes, why, "Leave it out for 8 MiB")
