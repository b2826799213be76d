from __future__ import annotations

from collections.abc import Callable

from atoll.agent.runtime.step.backward.exchange_times import ExchangeTimes
from atoll.agent.runtime.step.measures.clock import HostMark


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.quiet: list[float] = []
        self.times = ExchangeTimes(lambda: HostMark(self.now_s), lambda: self.quiet.append(self.now_s))
        self.ends: list[Callable[[object], None]] = []

    def launch(self, at_s: float) -> None:
        self.now_s = at_s
        self.ends.append(self.times.launching())

    def end(self, number: int, at_s: float) -> None:
        self.now_s = at_s
        self.ends[number](None)


def test_each_counts_from_when_it_could_begin() -> None:
    """1. The first takes 2 s. 2. The second is launched meanwhile and takes 3 s more. 3. Nothing is under way for 1 s.
    4. The last takes 1 s."""
    rig = Rig()
    rig.launch(10.0)
    rig.launch(11.0)
    rig.end(0, 12.0)
    rig.end(1, 15.0)
    rig.launch(16.0)
    rig.end(2, 17.0)
    assert rig.times.take() == (5.0, 1.0)


def test_those_that_end_out_of_order_are_not_counted_twice() -> None:
    """gloo has two threads: the small last one overtakes the large one before it."""
    rig = Rig()
    rig.launch(0.0)
    rig.launch(1.0)
    rig.end(1, 2.0)
    rig.end(0, 5.0)
    assert rig.times.take() == (5.0, 0.0)


def test_one_bucket_is_the_last_and_none_takes_no_time() -> None:
    rig = Rig()
    assert rig.times.take() == (0.0, 0.0)
    rig.launch(1.0)
    rig.end(0, 3.0)
    assert rig.times.take() == (0.0, 2.0)


def test_a_pass_that_was_broken_off_has_no_times_and_its_late_ends_touch_no_other() -> None:
    rig = Rig()
    rig.launch(0.0)
    rig.launch(0.0)
    rig.end(0, 1.0)
    assert rig.times.take() == (0.0, 0.0)
    rig.times.begin()
    rig.launch(5.0)
    rig.end(1, 9.0)  # of the pass before
    rig.end(2, 6.0)
    assert rig.times.take() == (0.0, 1.0)


def test_links_are_quiet_when_nothing_is_under_way_and_nothing_follows_at_once() -> None:
    """1. The first ends while the second is under way. 2. The second ends alone: quiet. 3. A third ends when a fourth
    is about to be launched: not quiet. 4. The fourth ends: quiet."""
    rig = Rig()
    rig.launch(0.0)
    rig.launch(1.0)
    rig.end(0, 2.0)
    assert rig.quiet == []
    rig.end(1, 3.0)
    rig.launch(4.0)
    rig.times.expect()
    rig.end(2, 5.0)
    rig.launch(6.0)
    rig.end(3, 7.0)
    assert rig.quiet == [3.0, 7.0]
