"""What a volunteer's answers take of its owner's line."""

from __future__ import annotations

from atoll.strategies.volunteer.answering import Uplink


def test_answers_take_no_more_than_they_may() -> None:
    uplink = Uplink(8e6)
    assert uplink.wait_s(2_000_000, 10.0) == 0.0
    assert uplink.wait_s(1_000_000, 10.5) == 1.5
    assert uplink.wait_s(1_000_000, 12.0) == 1.0
    assert uplink.wait_s(1, 60.0) == 0.0


def test_without_a_limit_nothing_waits() -> None:
    uplink = Uplink(0.0)
    assert [uplink.wait_s(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
