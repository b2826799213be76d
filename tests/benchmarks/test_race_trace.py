"""The link of the race over a trace: what it carries when, and what is told of it."""

from __future__ import annotations

import pytest
from race_trace import MODELS, Link


def test_a_link_tells_of_what_it_carried_until_now() -> None:
    """1. Of 3 bytes that are ready at 0.5 s the first half second carries one half, the second at a quarter of the rate
    one fourth, and so on. 2. Told in between, they are told as far as they went, and the time as busy. 3. What is ready
    before the link is free waits."""
    link = Link([8.0, 2.0])
    assert link.carry(0.5, 1.75) == pytest.approx(3.0)
    assert (link.told(0.9).sent_bytes, link.told(0.9).busy_s) == (0, 0.0)
    assert link.told(2.0).sent_bytes == 0.75 * MODELS
    assert link.told(2.0).busy_s == pytest.approx(1.5)
    assert link.carry(1.0, 0.25) == pytest.approx(4.0)
    told = link.told(4.0)
    assert told.sent_bytes == 2 * MODELS
    assert told.busy_s == pytest.approx(3.5)
