"""The ring of shared memory, both ends in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.transport.shared import Arena, ArenaView

RING = 64 * 1024


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(RING)
    yield arena
    arena.close()
    arena.close()


def test_what_was_put_is_taken_and_its_room_comes_back(arena: Arena) -> None:
    assert arena.put(b"x" * 100) is None  # not before the receiver has mapped it
    view = ArenaView.open(arena.offer)
    assert view is not None
    assert arena.accepted
    for turn in range(20):
        payloads = [os.urandom(15_000 + turn), os.urandom(20_001)]
        places = [arena.put(payload) for payload in payloads]
        for payload, place in zip(payloads, places, strict=True):
            assert place is not None
            assert view.take(place, len(payload)) == payload
    view.close()
    view.close()


def test_a_full_ring_says_so_until_something_is_taken(arena: Arena) -> None:
    view = ArenaView.open(arena.offer)
    assert view is not None
    first, second = arena.put(bytes(40_000)), arena.put(bytes(20_000))
    assert arena.put(bytes(20_000)) is None
    assert arena.put(bytes(RING + 1)) is None
    assert first is not None
    assert second is not None
    assert view.take(first, 40_000) is not None
    assert arena.put(bytes(20_000)) is not None  # from the start again, not over the edge
    view.close()


@given(st.lists(st.tuples(st.integers(1, RING), st.booleans()), max_size=40))
def test_nothing_is_overwritten_before_it_was_taken(moves: list[tuple[int, bool]]) -> None:
    arena = Arena(RING)
    view = ArenaView.open(arena.offer)
    assert view is not None
    lying: list[tuple[int, bytes]] = []
    for at, (length, take) in enumerate(moves):
        payload = bytes([at]) * length
        place = arena.put(payload)
        if place is not None:
            lying.append((place, payload))
        if take and lying:
            place, payload = lying.pop(0)
            assert view.take(place, len(payload)) == payload
    for place, payload in lying:
        assert view.take(place, len(payload)) == payload
    view.close()
    arena.close()


def test_a_place_that_cannot_be_is_refused(arena: Arena) -> None:
    view = ArenaView.open(arena.offer)
    assert view is not None
    place = arena.put(bytes(1000))
    assert place == 0
    assert view.take(RING - 10, 11) is None
    assert view.take(0, RING + 1) is None
    assert view.take(2**64 - 1, 2) is None
    assert view.take(0, 1000) is not None
    assert view.take(0, 1000) is None  # it was given back
    view.close()


def test_an_offer_that_is_not_what_it_says_is_not_accepted(arena: Arena) -> None:
    other = Arena(2 * RING)
    offer = bytearray(arena.offer)
    offer[-1] ^= 1  # another token: the process number was reused
    plain = os.memfd_create("plain")
    wrong = [
        b"",
        arena.offer[:-1],
        bytes(offer),
        arena.offer[:4] + (2**20).to_bytes(4, "little") + arena.offer[8:],
        arena.offer[:4] + other.offer[4:8] + arena.offer[8:],
        arena.offer[:4] + plain.to_bytes(4, "little") + arena.offer[8:],
        arena.offer[:8] + (RING + 1).to_bytes(8, "little") + arena.offer[16:],
        arena.offer[:8] + (2**60).to_bytes(8, "little") + arena.offer[16:],
    ]
    assert [ArenaView.open(one) for one in wrong] == [None] * len(wrong)
    assert not arena.accepted
    os.close(plain)
    other.close()


def test_both_ends_closed_leave_no_descriptor_and_no_file() -> None:
    before = (len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm"))
    arena = Arena(RING)
    view = ArenaView.open(arena.offer)
    assert view is not None
    arena.close()
    view.close()
    assert (len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")) == before
