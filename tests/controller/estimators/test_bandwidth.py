from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from atoll.controller.estimators.bandwidth import BandwidthEstimator, ObservedLink
from atoll.controller.estimators.profile import LinkEstimate

MBIT = 1e6


class Island:
    """One rank that sends to another island over a link of `capacity` bits a second, and reports once a second.

    offered: bits a second that training would send. A burst's busy time also holds `delay_s` for each of ten a second.
    """

    def __init__(self, *, delay_s: float = 0.0, noise: float = 0.02, seed: int = 1, step_s: float = 0.0) -> None:
        self.estimator = BandwidthEstimator()
        self.now_s = 100.0
        self.sent_bytes, self.busy_s = 0.0, 0.0
        self.delay_s, self._noise, self._rng, self._step_s = delay_s, noise, random.Random(seed), step_s
        self._report(0.0)

    def _report(self, stall_share: float) -> None:
        link = ObservedLink(peer=1, sent_bytes=int(self.sent_bytes), busy_s=self.busy_s)
        self.estimator.observe(0, {0: "a", 1: "b"}, [link], self.now_s, stall_share=stall_share, step_s=self._step_s)

    def run(self, seconds: int, capacity: float, offered: float, stall_share: float | None = None) -> None:
        for _ in range(seconds):
            real = capacity * self._rng.lognormvariate(0, self._noise)
            sent = min(real, offered)
            self.now_s += 1.0
            self.sent_bytes += sent / 8
            self.busy_s += min(sent / real + 10 * self.delay_s, 1.0)
            stalled = max(0.0, 1 - sent / offered) if stall_share is None else stall_share
            self._report(stalled)

    @property
    def link(self) -> LinkEstimate:
        return self.estimator.estimates()["a"]


def test_a_saturated_link_tells_what_it_carries() -> None:
    island = Island()
    island.run(20, 480 * MBIT, 600 * MBIT)
    assert island.link.bandwidth_bps == pytest.approx(480 * MBIT, rel=0.05)
    assert 0.01 < island.link.error < 0.05


def test_a_drop_is_followed_within_three_seconds() -> None:
    """480 to 95 Mbit/s, at the rate that suited 480."""
    island = Island()
    island.run(30, 480 * MBIT, 450 * MBIT)
    island.run(3, 95 * MBIT, 450 * MBIT)
    assert island.link.bandwidth_bps == pytest.approx(95 * MBIT, rel=0.05)
    assert island.link.error < 0.1


def test_a_rise_is_followed_too_but_slowly() -> None:
    """The rate suits 95 Mbit/s, and training follows the estimate as it rises."""
    island = Island()
    island.run(30, 95 * MBIT, 120 * MBIT)
    seen = []
    for _ in range(40):
        island.run(1, 480 * MBIT, 0.9 * island.link.bandwidth_bps)
        seen.append(island.link.bandwidth_bps)
    assert seen[1] < 1.4 * 95 * MBIT
    assert seen[19] > 400 * MBIT
    assert seen[-1] == pytest.approx(480 * MBIT, rel=0.05)


def test_one_second_of_other_traffic_cuts_nothing() -> None:
    island = Island()
    island.run(30, 480 * MBIT, 600 * MBIT)
    island.run(1, 50 * MBIT, 600 * MBIT)
    island.run(1, 480 * MBIT, 600 * MBIT)
    assert island.link.bandwidth_bps > 440 * MBIT


def test_short_bursts_over_a_long_way_do_not_cut_what_a_saturated_link_told() -> None:
    """Ten bursts a second of 30 ms delay each look like a quarter of the bandwidth."""
    island = Island(delay_s=0.03)
    island.run(20, 480 * MBIT, 600 * MBIT)
    island.run(60, 480 * MBIT, 40 * MBIT)
    assert island.link.bandwidth_bps > 440 * MBIT
    assert island.link.error < 0.2


def test_a_link_nobody_waits_for_is_raised_slowly_above_what_its_bursts_tell() -> None:
    island = Island(delay_s=0.02)
    island.run(5, 480 * MBIT, 40 * MBIT)
    told = island.link.bandwidth_bps
    assert told < 200 * MBIT
    assert island.link.error > 0.2
    island.run(20, 480 * MBIT, 40 * MBIT)
    assert 1.2 * told < island.link.bandwidth_bps <= 1.51 * told
    island.run(600, 480 * MBIT, 40 * MBIT)
    assert island.link.bandwidth_bps < 1.6 * told


def test_what_little_a_step_sends_cuts_nothing_while_nobody_waits() -> None:
    """A model of 40 000 parameters: 9 kB a step of 60 ms. A burst's way there and back takes 5 ms, and then 50 and 100
    ms, while the processor is busy with something else: the link looks busy all the time with 1.2 Mbit/s."""
    island = Island(delay_s=0.005, step_s=0.06)
    island.run(20, 20 * MBIT, 1.2 * MBIT)
    before = island.link.bandwidth_bps
    assert before > 10 * MBIT
    for delay_s in (0.05, 0.1):
        island.delay_s = delay_s
        island.run(20, 20 * MBIT, 1.2 * MBIT)
    assert island.link.bandwidth_bps >= before


def test_what_little_a_step_sends_tells_of_a_link_that_all_wait_for() -> None:
    island = Island(step_s=0.06)
    island.run(20, 20 * MBIT, 1.2 * MBIT)
    island.run(4, 0.9 * MBIT, 1.2 * MBIT)
    assert island.link.bandwidth_bps == pytest.approx(0.9 * MBIT, rel=0.1)


def test_training_that_waits_for_a_loaded_link_cuts_the_estimate() -> None:
    """Busy for 70 % of the time, and still every rank waits: what it carries for training is less than its goodput."""
    island = Island()
    island.run(10, 100 * MBIT, 70 * MBIT, stall_share=0.0)
    before = island.link.bandwidth_bps
    island.run(5, 100 * MBIT, 70 * MBIT, stall_share=0.3)
    assert 0.6 * before < island.link.bandwidth_bps < 0.8 * before


def test_training_that_waits_for_something_else_cuts_nothing() -> None:
    """The link is idle for nine tenths of the time."""
    island = Island()
    island.run(10, 480 * MBIT, 40 * MBIT, stall_share=0.0)
    before = island.link.bandwidth_bps
    island.run(20, 480 * MBIT, 40 * MBIT, stall_share=0.5)
    assert island.link.bandwidth_bps > 0.95 * before


def test_a_link_that_was_never_saturated_shows_its_drop_in_longer_bursts() -> None:
    island = Island()
    island.run(30, 480 * MBIT, 45 * MBIT)
    before = island.link.bandwidth_bps
    island.run(4, 95 * MBIT, 45 * MBIT)
    assert island.link.bandwidth_bps < 0.25 * before


def test_a_smaller_load_is_no_drop() -> None:
    island = Island(delay_s=0.01)
    island.run(30, 480 * MBIT, 200 * MBIT)
    before = island.link.bandwidth_bps
    island.run(20, 480 * MBIT, 20 * MBIT)
    assert island.link.bandwidth_bps >= 0.95 * before


def reported(
    estimator: BandwidthEstimator, seconds: range, ranks: dict[int, Callable[[int], list[ObservedLink]]]
) -> None:
    islands = {0: "a", 1: "a", 2: "b", 3: "c"}
    for second in seconds:
        for rank, links in ranks.items():
            estimator.observe(rank, islands, links(second), float(second) + 0.1 * rank, stall_share=0.0)


def test_ranks_of_an_island_share_its_link() -> None:
    """Both send 50 Mbit/s all the time: the link carries 100. Links within the island count for nothing."""
    estimator = BandwidthEstimator()

    def links(second: int) -> list[ObservedLink]:
        away = ObservedLink(peer=2, sent_bytes=int(second * 50 * MBIT / 8), busy_s=1.0 * second)
        return [away, ObservedLink(peer=1, sent_bytes=second * 10**9, busy_s=0.1 * second)]

    reported(estimator, range(10), {0: links, 1: links})
    found = estimator.estimates()
    assert list(found) == ["a"]
    assert found["a"].bandwidth_bps == pytest.approx(100 * MBIT)


def test_two_peers_of_one_rank_share_its_link() -> None:
    estimator = BandwidthEstimator()

    def links(second: int) -> list[ObservedLink]:
        return [ObservedLink(peer=p, sent_bytes=int(second * 40 * MBIT / 8), busy_s=1.0 * second) for p in (2, 3)]

    reported(estimator, range(10), {0: links})
    assert estimator.estimates()["a"].bandwidth_bps == pytest.approx(80 * MBIT)


def test_senseless_reports_change_nothing() -> None:
    island = Island()
    island.run(10, 480 * MBIT, 600 * MBIT)
    before = island.link
    islands = {0: "a", 1: "b"}
    for link in (
        ObservedLink(peer=1, sent_bytes=10**12, busy_s=math.nan),
        ObservedLink(peer=1, sent_bytes=-1, busy_s=1.0),
        ObservedLink(peer=1, sent_bytes=0, busy_s=math.inf),
        ObservedLink(peer=77, sent_bytes=10**12, busy_s=1.0),
    ):
        island.now_s += 1.0
        island.estimator.observe(0, islands, [link], island.now_s, stall_share=0.0)
    island.estimator.observe(
        9, islands, [ObservedLink(peer=1, sent_bytes=10**12, busy_s=1.0)], island.now_s, stall_share=0.0
    )
    assert island.link == before


def test_a_connection_that_begins_anew_is_counted_anew() -> None:
    island = Island()
    island.run(10, 480 * MBIT, 600 * MBIT)
    island.sent_bytes = island.busy_s = 0.0
    island.run(10, 480 * MBIT, 600 * MBIT)
    assert island.link.bandwidth_bps == pytest.approx(480 * MBIT, rel=0.05)


def test_links_without_traffic_are_not_listed() -> None:
    estimator = BandwidthEstimator()
    reported(
        estimator, range(10), {0: lambda second: [ObservedLink(peer=2, sent_bytes=100 * second, busy_s=0.001 * second)]}
    )
    assert estimator.estimates() == {}
