from __future__ import annotations

import math
import time

import pytest

from atoll.agent.runtime.step.throttle import Throttle
from atoll.errors import BadInput


def work(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        pass


def test_quarter_speed_takes_four_times_as_long_however_often_it_pays() -> None:
    throttle = Throttle(0.25)
    begun_s = time.monotonic()
    throttle.resume()
    worked_s = 0.0
    for _ in range(20):
        before_s = time.monotonic()
        work(0.005)
        worked_s += time.monotonic() - before_s
        throttle.pay()
    assert time.monotonic() - begun_s == pytest.approx(4 * worked_s, rel=0.15)


def test_waiting_for_others_is_not_stretched() -> None:
    throttle = Throttle(0.5)
    work(0.2)  # stands for a wait
    throttle.resume()
    begun_s = time.monotonic()
    throttle.pay()
    assert time.monotonic() - begun_s < 0.05


def test_full_speed_never_sleeps_and_finishes_no_device_work() -> None:
    synced: list[int] = []
    throttle = Throttle(1.0, lambda: synced.append(1))
    throttle.pay()
    assert synced == []
    Throttle(0.9, lambda: synced.append(1)).pay()
    assert synced == [1]


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5, math.nan])
def test_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(BadInput, match="speed"):
        Throttle(speed)


def test_waiting_in_the_middle_of_compute_is_not_stretched() -> None:
    """A forward pass over thin links: layers wait for their updates between one piece of compute and the next."""
    throttle = Throttle(0.5)
    throttle.resume()
    work(0.2)  # stands for a wait
    throttle.waited(0.2)
    begun_s = time.monotonic()
    throttle.pay()
    assert time.monotonic() - begun_s < 0.1
