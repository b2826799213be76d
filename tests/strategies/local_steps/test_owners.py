from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.strategies.shared_masters.owners import owners_of, turns_of


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_owners_and_their_turns_carry_about_as_much(
    entries: list[int], every: int, owners: int, chance: random.Random
) -> None:
    """No owner has more than another by more than the largest layer, nor has a turn of an owner's, whoever owned what
    before. Who owns what is the same however many turns there are."""
    before = [chance.choice([None, chance.randrange(owners), 0]) for _ in entries]
    owner_of = owners_of(entries, owners, before if chance.random() < 0.8 else ())
    turns, largest = turns_of(entries, owner_of, every), max(entries, default=0)
    routes = list(zip(entries, owner_of, turns, strict=True))
    loads = [sum(n for n, owner, _ in routes if owner == one) for one in range(owners)]
    assert max(loads) - min(loads) <= largest
    for one in range(owners):
        loads = [sum(n for n, owner, turn in routes if (owner, turn) == (one, at)) for at in range(every)]
        assert max(loads) - min(loads) <= largest


def test_all_owners_get_some_of_layers_alike_in_every_turn() -> None:
    owner_of = owners_of([5] * 8, 4)
    assert sorted(zip(owner_of, turns_of([5] * 8, owner_of, 2), strict=True)) == [
        (owner, turn) for owner in range(4) for turn in range(2)
    ]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(2, 6), st.integers(0, 5))
def test_who_is_left_after_a_loss_keeps_what_it_owned(entries: list[int], owners: int, lost: int) -> None:
    """The lost one's layers alone get another owner, where shares were even; the same members keep all."""
    owned = owners_of(entries, owners)
    assert owners_of(entries, owners, owned) == owned
    lost %= owners
    renumbered = {one: number for number, one in enumerate(one for one in range(owners) if one != lost)}
    before = [renumbered.get(one) for one in owned]
    after = owners_of(entries, owners - 1, before)
    assert all(then in (owner, None) for owner, then in zip(after, before, strict=True))


def test_who_joins_gets_its_share_of_what_others_owned_and_nothing_else_moves() -> None:
    before = [0, 1] * 6
    after = owners_of([5] * 12, 3, before)
    assert [after.count(one) for one in range(3)] == [4, 4, 4]
    assert sum(then != owner for then, owner in zip(after, before, strict=True)) == 4
