"""When a peer counts as silent, by what the kernel says of the connection."""

from __future__ import annotations

from atoll.agent.runtime.transport.meter import KernelCounts
from atoll.agent.runtime.transport.pulse import Pulse

TICK_S = 0.1


class Clock:
    """A pulse with 10 s for silence, asked ten times a second."""

    def __init__(self) -> None:
        self.pulse = Pulse(interval_s=2.5, patience_s=7.5)
        self.now_s = 100.0

    def silent_after_s(self, counts: KernelCounts, for_s: float, behind_bytes: int = 0, carries_bps: int = 0) -> float:
        """After how long it counts as silent; -1 if never in `for_s`. carries_bps: bits a second acknowledged."""
        begun_s, first = self.now_s, counts
        while self.now_s - begun_s < for_s:
            moved = min(int(carries_bps / 8 * (self.now_s - begun_s)), first.waiting_bytes)
            counts = KernelCounts(first.waiting_bytes - moved, (first.acked_bytes or 0) + moved, first.received_bytes)
            if self.pulse.silent(counts, behind_bytes, self.now_s):
                return self.now_s - begun_s
            self.now_s += TICK_S
        return -1.0


def test_who_answers_no_heartbeat_on_an_idle_link_is_silent_in_time() -> None:
    assert 9.9 < Clock().silent_after_s(KernelCounts(0, 0, 10), 60) < 10.5


def test_who_answers_every_heartbeat_never_is() -> None:
    clock = Clock()
    for answers in range(100):
        assert clock.silent_after_s(KernelCounts(0, 0, 10 * answers), 2.5) == -1


def test_a_heartbeat_behind_what_a_thin_link_still_carries_is_no_silence() -> None:
    """4 MB stood before it when the link fell to 1 Mbit/s: 32 s. The clock runs from then on."""
    after_s = Clock().silent_after_s(KernelCounts(4_000_000, 0, 10), 120, carries_bps=1_000_000)
    assert 32 + 7.4 < after_s < 32 + 8


def test_what_the_sender_holds_beside_the_kernel_stands_before_it_too() -> None:
    """1 MB in the kernel and 1 MB to come when the heartbeat was due, and more follows: at 1 Mbit/s 16 s."""
    clock = Clock()
    clock.silent_after_s(KernelCounts(1_000_000, 0, 10), 2.6, behind_bytes=1_000_000)
    after_s = clock.silent_after_s(KernelCounts(20_000_000, 0, 10), 120, 1_000_000, carries_bps=1_000_000)
    assert 16 + 7.4 < after_s < 16 + 8


def test_who_was_stopped_itself_reads_answers_first() -> None:
    clock = Clock()
    assert clock.silent_after_s(KernelCounts(0, 0, 10), 5) == -1
    clock.now_s += 60
    assert clock.silent_after_s(KernelCounts(0, 0, 10), 1) == -1
    assert clock.silent_after_s(KernelCounts(0, 0, 20), 2.5) == -1


def test_a_connection_without_counts_is_judged_elsewhere() -> None:
    pulse = Pulse(interval_s=2.5, patience_s=7.5)
    assert not any(pulse.silent(KernelCounts(0, None), 0, float(now_s)) for now_s in range(100))
