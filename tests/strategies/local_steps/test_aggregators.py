from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.strategies.shared_params.exchange import aggregators_of, turns_of


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_aggregators_and_their_turns_carry_about_as_much(
    entries: list[int], every: int, aggregators: int, chance: random.Random
) -> None:
    """No aggregator has more than another by more than the largest layer, nor has a turn of an aggregator's, whoever
    owned what before. Who owns what is the same however many turns there are."""
    before = [chance.choice([None, chance.randrange(aggregators), 0]) for _ in entries]
    aggregator_of = aggregators_of(entries, aggregators, before if chance.random() < 0.8 else ())
    turns, largest = turns_of(entries, aggregator_of, every), max(entries, default=0)
    routes = list(zip(entries, aggregator_of, turns, strict=True))
    loads = [sum(n for n, aggregator, _ in routes if aggregator == one) for one in range(aggregators)]
    assert max(loads) - min(loads) <= largest
    for one in range(aggregators):
        loads = [sum(n for n, aggregator, turn in routes if (aggregator, turn) == (one, at)) for at in range(every)]
        assert max(loads) - min(loads) <= largest


def test_all_aggregators_get_some_of_layers_alike_in_every_turn() -> None:
    aggregator_of = aggregators_of([5] * 8, 4)
    assert sorted(zip(aggregator_of, turns_of([5] * 8, aggregator_of, 2), strict=True)) == [
        (aggregator, turn) for aggregator in range(4) for turn in range(2)
    ]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(2, 6), st.integers(0, 5))
def test_who_is_left_after_a_loss_keeps_what_it_owned(entries: list[int], aggregators: int, lost: int) -> None:
    """The lost one's layers alone get another aggregator, where shares were even; the same members keep all."""
    owned = aggregators_of(entries, aggregators)
    assert aggregators_of(entries, aggregators, owned) == owned
    lost %= aggregators
    renumbered = {one: number for number, one in enumerate(one for one in range(aggregators) if one != lost)}
    before = [renumbered.get(one) for one in owned]
    after = aggregators_of(entries, aggregators - 1, before)
    assert all(then in (aggregator, None) for aggregator, then in zip(after, before, strict=True))


def test_who_joins_gets_its_share_of_what_others_owned_and_nothing_else_moves() -> None:
    before = [0, 1] * 6
    after = aggregators_of([5] * 12, 3, before)
    assert [after.count(one) for one in range(3)] == [4, 4, 4]
    assert sum(then != aggregator for then, aggregator in zip(after, before, strict=True)) == 4
