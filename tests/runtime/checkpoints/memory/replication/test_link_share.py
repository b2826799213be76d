from __future__ import annotations

import pytest

from atoll.agent.runtime.checkpoints.memory.replication.link_share import MIN_COPIES_SHARE, LinkShare

BANDWIDTH = 1.25e6  # 10 Mbit/s
CHUNK_BYTES = 16 * 1024
STEP_S = 0.25
TURN_S = 0.005


def trained(share: LinkShare, busy: float, for_s: float, *, peers: int = 1, carries: float = 2 * BANDWIDTH) -> float:
    """An exchange that is on its way for this part of each step; until when."""
    now_s = 0.0
    while now_s < for_s:
        now_s += STEP_S
        share.observe(dict.fromkeys(range(1, peers + 1), busy * now_s), int(busy * now_s * carries), now_s)
    return now_s


def copied(share: LinkShare, now_s: float, for_s: float, busy: float) -> float:
    """Bytes of copies that leave, where the exchange is on its way in the first part of each step."""
    sent, ends_s = 0, now_s + for_s
    while now_s < ends_s:
        now_s += TURN_S
        allowed = share.allowed(BANDWIDTH, CHUNK_BYTES, now_s, waits=now_s % STEP_S < busy * STEP_S)
        if allowed >= CHUNK_BYTES:
            share.spend(allowed)
            sent += allowed
    return sent


@pytest.mark.parametrize("busy", [0.35, 0.7, 1.0])
def test_of_a_link_that_the_exchange_needs_copies_have_a_bounded_part(busy: float) -> None:
    share = LinkShare()
    now_s = trained(share, busy, 60)
    assert share.share == MIN_COPIES_SHARE
    part = copied(share, now_s, 100, busy) / (100 * BANDWIDTH)
    assert 0.9 * MIN_COPIES_SHARE < part < 1.05 * MIN_COPIES_SHARE


def test_nothing_is_saved_up_while_there_is_nothing_to_send() -> None:
    """1. A generation is whole; the next begins after ten minutes. 2. It has no right to the ten minutes' bytes."""
    share = LinkShare()
    now_s = trained(share, 0.7, 60)
    share.allowed(BANDWIDTH, CHUNK_BYTES, now_s, waits=False)
    assert share.allowed(BANDWIDTH, CHUNK_BYTES, now_s + 600, waits=False) <= 0.1 * BANDWIDTH


def test_while_the_exchange_is_on_its_way_a_chunk_leaves_only_where_nothing_more_can_be_saved() -> None:
    share = LinkShare()
    now_s = trained(share, 1.0, 60)
    share.allowed(BANDWIDTH, CHUNK_BYTES, now_s, waits=True)
    assert share.allowed(BANDWIDTH, CHUNK_BYTES, now_s + 0.1, waits=True) == 0
    assert share.missing_s(BANDWIDTH, CHUNK_BYTES) == 0  # it may go at once when the exchange pauses
    assert share.allowed(BANDWIDTH, CHUNK_BYTES, now_s + 10, waits=True) == CHUNK_BYTES
    share.spend(CHUNK_BYTES)
    assert share.allowed(BANDWIDTH, CHUNK_BYTES, now_s + 10.01, waits=True) == 0


def test_on_a_fat_link_copies_are_not_held_back() -> None:
    share = LinkShare()
    assert share.share == MIN_COPIES_SHARE  # until anything is known
    trained(share, 0.07, 15)
    assert share.share is None


def test_the_less_the_exchange_needs_the_more_copies_have() -> None:
    """A density that is pinned, and leaves most of the link."""
    share = LinkShare()
    trained(share, 0.2, 120)
    assert share.share == pytest.approx(0.5, abs=0.01)


def test_peers_share_the_link_they_are_busy_on() -> None:
    """Two islands, each sent to in half of the time: in a quarter nothing is on its way to either."""
    share = LinkShare()
    trained(share, 0.5, 120, peers=2)
    assert share._needed == pytest.approx(0.75, abs=0.01)


def test_a_link_is_as_wide_as_the_exchange_finds_it_where_copies_found_it_wider() -> None:
    """A few chunks at a time come through a token bucket as if there was no link."""
    share = LinkShare()
    now_s = trained(share, 0.7, 60, carries=BANDWIDTH / 4)
    assert share.bandwidth == pytest.approx(BANDWIDTH / 4, rel=0.05)
    part = copied(share, now_s, 100, 0.7) / (100 * BANDWIDTH / 4)
    assert part < 1.05 * MIN_COPIES_SHARE


def test_a_connection_that_began_anew_tells_nothing_of_what_was() -> None:
    share = LinkShare()
    now_s = trained(share, 0.7, 60)
    share.observe({1: 0.0}, 0, now_s + STEP_S)
    share.observe({1: 0.7 * STEP_S}, 1000, now_s + 2 * STEP_S)
    assert share.share == MIN_COPIES_SHARE


def test_bytes_of_copies_count_for_the_link_as_far_as_the_exchange_was_on_its_way() -> None:
    """So bytes over busy time are what the link carries, whatever copies took of it."""
    share = LinkShare()
    share.observe({1: 10.0, 2: 4.0}, 0, 20.0)
    share.mark()
    share.observe({1: 10.3, 2: 4.0}, 0, 21.0)
    assert share.beside(100_000) == (1, 30_000)
    share.observe({1: 10.3, 2: 4.0}, 0, 22.0)
    assert share.beside(50_000) is None  # the exchange was not there
    share.observe({1: 10.3, 2: 5.0}, 0, 23.0)
    assert share.beside(50_000) == (2, 50_000)
