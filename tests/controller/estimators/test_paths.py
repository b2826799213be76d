"""What connections between two islands carry."""

from __future__ import annotations

import math

import pytest

from atoll.controller.estimators import bandwidth as paths
from atoll.controller.estimators.bandwidth import (
    FORGET_PATH_S,
    MIN_BYTES,
    WINDOW_INTERVALS,
    ObservedLink,
    PathEstimator,
)

ISLANDS = {0: "a", 1: "b", 2: "c", 3: "a"}
MBIT = 1e6


class Sender:
    """Rank 0, which sends to others at their speeds, all the time, and reports once a second."""

    def __init__(self, **bps: float) -> None:
        self.estimator, self.now_s = PathEstimator(), 50.0
        self.sent = {int(peer[1:]): 0.0 for peer in bps}
        self.busy_s = 0.0
        self.run(1, **dict.fromkeys(bps, 0.0))

    def run(self, seconds: int, **bps: float) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.busy_s += 1.0
            for peer, each in bps.items():
                self.sent[int(peer[1:])] += each / 8
            links = [
                ObservedLink(peer=peer, sent_bytes=int(sent), busy_s=self.busy_s) for peer, sent in self.sent.items()
            ]
            self.estimator.observe(0, ISLANDS, links, self.now_s)


def test_a_sender_that_one_peer_holds_up_tells_the_paths_apart() -> None:
    sender = Sender(r1=1, r2=1, r3=1)
    sender.run(10, r1=400 * MBIT, r2=5 * MBIT, r3=900 * MBIT)
    assert sender.estimator.estimates() == pytest.approx({("a", "b"): 400 * MBIT, ("a", "c"): 5 * MBIT}, rel=1e-4)


def test_a_path_that_changed_is_what_it_is_now_after_half_a_window_and_forgotten_after_a_minute() -> None:
    sender = Sender(r1=1)
    sender.run(20, r1=400 * MBIT)
    sender.run(WINDOW_INTERVALS // 2 + 1, r1=40 * MBIT)
    assert sender.estimator.estimates()["a", "b"] == pytest.approx(40 * MBIT, rel=1e-4)
    sender.run(int(FORGET_PATH_S) + 1, r1=0)
    assert sender.estimator.estimates() == {}


def test_little_is_counted_together_until_it_is_enough() -> None:
    """A quarter of what is enough in each second that it is busy."""
    sender = Sender(r1=1)
    sender.run(3, r1=8 * MIN_BYTES / 4)
    assert sender.estimator.estimates() == {}
    sender.run(1, r1=8 * MIN_BYTES / 4)
    assert sender.estimator.estimates()["a", "b"] == pytest.approx(8 * MIN_BYTES / 4, rel=1e-4)


def test_a_connection_that_began_anew_and_what_makes_no_sense_count_for_nothing() -> None:
    estimator, now_s = PathEstimator(), 0.0
    for sent, busy_s in (
        (0, 0.0),
        (10**8, 1.0),
        (10**6, 0.1),
        (2 * 10**8, 1.1),
        (3 * 10**8, math.inf),
        (4 * 10**8, 1.1),
    ):
        now_s += 1
        links = [ObservedLink(peer=peer, sent_bytes=sent, busy_s=busy_s) for peer in (1, 9)]
        estimator.observe(0, ISLANDS, links, now_s)
    assert estimator.estimates() == {("a", "b"): pytest.approx((8e8 + 8 * 199e6) / 2)}


def test_of_too_many_paths_the_newest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_PATHS", 1)
    sender = Sender(r1=1, r2=1)
    sender.run(3, r1=MBIT, r2=MBIT)
    assert list(sender.estimator.estimates()) == [("a", "b")]
