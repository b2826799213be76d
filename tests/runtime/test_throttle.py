from __future__ import annotations

import math

import pytest

from atoll.agent.runtime.session import throttle as throttled
from atoll.agent.runtime.session.throttle import Throttle
from atoll.errors import BadInput


class Clock:
    """In place of the module `time`: nothing passes but by work and sleep, and each sleep takes 1 ms too long."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 0.001


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttled, "time", clock)
    return clock


def test_quarter_speed_takes_four_times_as_long_however_often_it_pays(clock: Clock) -> None:
    throttle = Throttle(0.25)
    begun_s = clock.now_s
    throttle.resume()
    for _ in range(20):
        clock.work(0.005)
        throttle.pay()
    assert clock.now_s - begun_s == pytest.approx(4 * 20 * 0.005 + 0.001)


def test_waiting_for_others_is_not_stretched(clock: Clock) -> None:
    throttle = Throttle(0.5)
    clock.work(0.2)  # stands for a wait
    throttle.resume()
    begun_s = clock.now_s
    throttle.pay()
    assert clock.now_s == begun_s


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


def test_waiting_in_the_middle_of_compute_is_not_stretched(clock: Clock) -> None:
    """A forward pass over thin links: layers wait for their updates between one piece of compute and the next."""
    throttle = Throttle(0.5)
    throttle.resume()
    clock.work(0.2)  # stands for a wait
    throttle.waited(0.2)
    begun_s = clock.now_s
    throttle.pay()
    assert clock.now_s == pytest.approx(begun_s)
