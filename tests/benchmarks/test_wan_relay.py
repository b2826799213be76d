"""The relay's order of frames, without a network."""

from __future__ import annotations

from lab.relay import VNET_HEADER, DelayLine, Switch

A, B, C = (bytes([2, 0, 0, 0, 0, n]) for n in (1, 2, 3))
ALL = b"\xff" * 6


def frame(to: bytes, source: bytes) -> bytes:
    return bytes(VNET_HEADER) + to + source + b"payload"


def test_frames_leave_after_the_delay_in_the_order_of_arrival() -> None:
    line = DelayLine(0.025)
    for number, now in enumerate((1.0, 1.0, 1.01)):
        line.put(now, number, bytes([255 - number]))  # content must not order them
    assert line.due(1.02) is None
    assert line.wait_s(1.02) == 1.025 - 1.02
    assert [line.due(1.03), line.due(1.03), line.due(1.03)] == [(0, b"\xff"), (1, b"\xfe"), None]
    assert line.due(1.04) == (2, b"\xfd")


def test_an_empty_line_has_nothing_to_wait_for_and_an_overdue_frame_no_time() -> None:
    line = DelayLine(0.5)
    assert (line.wait_s(0.0), line.due(100.0)) == (None, None)
    line.put(0.0, 0, b"late")
    assert line.wait_s(3.0) == 0.0


def test_the_switch_floods_until_it_knows_where_an_address_is() -> None:
    switch = Switch(3)
    assert list(switch.outputs(0, frame(ALL, A))) == [1, 2]
    assert list(switch.outputs(1, frame(C, B))) == [0, 2]  # nobody heard C yet
    assert list(switch.outputs(1, frame(A, B))) == [0]
    assert list(switch.outputs(2, frame(B, C))) == [1]
    assert list(switch.outputs(0, frame(C, A))) == [2]


def test_the_switch_sends_nothing_back_where_it_came_from() -> None:
    switch = Switch(2)
    switch.outputs(0, frame(ALL, A))
    assert list(switch.outputs(0, frame(A, B))) == []
