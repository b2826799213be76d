"""Counts of a connection when it ends."""

from __future__ import annotations

from atoll.agent.runtime.transport.meter import KernelCounts, Meter


def test_what_left_after_the_last_window_counts_once_the_connection_has_ended() -> None:
    """1. The kernel has acknowledged 70 of 100 bytes when it is last read. 2. The connection is closed after all of
    them: 90 left on it, for 10 went through shared memory. 3. An acknowledged count above that stays, with framing."""
    meter = Meter(bytes_sent=100, bytes_shared=10)
    meter.sample(KernelCounts(waiting_bytes=30, acked_bytes=70))
    assert meter.link(1).bytes_left == 70
    meter.end()
    assert meter.link(1).bytes_left == 90
    meter.sample(KernelCounts(waiting_bytes=0, acked_bytes=95))
    meter.end()
    assert meter.link(1).bytes_left == 95
