"""The order in which a shard comes to the ranks that lack it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import deliveries


def test_a_machine_receives_it_once_and_hands_it_to_its_own_ranks() -> None:
    assert deliveries([0, 1], ["a", "a", "b", "b", "b"]) == [(0, 2), (2, 3), (2, 4)]
    assert deliveries([0, 1], ["a", "a", "b", "b", "b"], turn=1) == [(1, 3), (3, 2), (3, 4)]


def test_who_has_received_it_sends_it_too() -> None:
    assert deliveries([0], range(6)) == [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)]


def test_all_who_hold_it_send() -> None:
    assert deliveries([0, 1, 2], range(6)) == [(0, 3), (1, 4), (2, 5)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data(), st.integers(0, 50))
def test_everyone_has_it_in_the_end_and_nobody_sends_what_it_has_not(
    machines: list[int], data: st.DataObject, turn: int
) -> None:
    ranks = range(len(machines))
    have = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
    holders, between = set(have), 0
    for source, to in deliveries(holders, machines, turn):
        assert source in have
        assert to not in have
        have.add(to)
        between += machines[source] != machines[to]
    assert have == set(ranks)
    assert between == len(set(machines)) - len({machines[rank] for rank in holders})
