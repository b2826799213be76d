"""Links that are simulated: what they deliver is known to the byte, and no clock is involved."""

from __future__ import annotations

import pytest
from simulated_links import Link

from atoll.agent.runtime.checkpoints.memory.replication.path_model import CHUNKS_PER_WINDOW, MAX_CHUNK_BYTES, PathModel


@pytest.mark.parametrize("rtt_s", [0.0002, 0.05, 0.2])
@pytest.mark.parametrize("bandwidth", [1.25e6, 25e6, 119e6])
def test_the_link_is_full_and_its_queue_is_short(bandwidth: float, rtt_s: float) -> None:
    """After a few files more than 95 % of the link is used; beyond what it holds wait 20 ms of it, or 64 KiB."""
    path, link = PathModel(), Link(bandwidth, rtt_s)
    for _ in range(4):
        link.copy(path, int(bandwidth))
    total = int(2 * bandwidth)
    took_s = link.copy(path, total)
    assert total / (took_s - rtt_s) > 0.95 * bandwidth
    assert path.bandwidth == pytest.approx(bandwidth, rel=0.05)
    waiting = path.window_bytes - bandwidth * rtt_s
    assert waiting < max(bandwidth * (0.02 + 0.6 * rtt_s), 64 * 1024 + path.chunk_bytes)
    assert path.chunk_bytes <= MAX_CHUNK_BYTES


def test_a_link_that_became_slower_or_faster_is_measured_anew() -> None:
    path, link = PathModel(), Link(100e6, 0.01)
    link.copy(path, 200_000_000)
    link.bandwidth = 10e6
    link.copy(path, 40_000_000)
    assert path.bandwidth == pytest.approx(10e6, rel=0.05)
    link.bandwidth = 100e6
    link.copy(path, 400_000_000)
    assert path.bandwidth == pytest.approx(100e6, rel=0.05)


def test_before_the_first_answer_nothing_is_known() -> None:
    path = PathModel()
    path.sent(1000, 0.0)
    assert (path.bandwidth, path.delay_s) == (None, 0.0)
    assert path.window_bytes == CHUNKS_PER_WINDOW * path.chunk_bytes


def test_what_was_sent_before_it_was_gone_back_measures_nothing() -> None:
    path = PathModel()
    path.sent(1000, 0.0)
    path.restart(0)
    path.reached(1000, 0.001)
    assert path.bandwidth is None


def test_a_window_shares_the_links_delay() -> None:
    path, link = PathModel(), Link(25e6, 0.05)
    for _ in range(4):
        link.copy(path, 25_000_000)
    chunks = path.window_bytes / path.chunk_bytes
    assert path.alpha_s == pytest.approx(0.05 / chunks, rel=0.2)


@pytest.mark.parametrize("rtt_s", [0.0002, 0.05])
def test_bytes_beyond_the_links_own_delay_are_queued(rtt_s: float) -> None:
    """1. A link of 25 MB/s is known. 2. As much leaves as it holds, and 5 MB more: what leaves next is 200 ms late."""
    path, link = PathModel(), Link(25e6, rtt_s)
    for _ in range(4):
        link.copy(path, 25_000_000)
    assert path.queued_s == 0.0
    path.restart(0)
    holds = round(25e6 * path.delay_s)
    path.sent(holds, link.now_s)
    assert path.queued_s == pytest.approx(0.0, abs=0.001)
    path.sent(holds + 5_000_000, link.now_s)
    assert path.queued_s == pytest.approx(0.2, rel=0.05)


def test_an_unknown_link_has_no_queue() -> None:
    path = PathModel()
    path.sent(10_000_000, 0.0)
    assert path.queued_s == 0.0
