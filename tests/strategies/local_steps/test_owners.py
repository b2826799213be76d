from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.strategies.shared_masters.owners import owners_of, turns_of


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_owners_and_their_turns_carry_about_as_much(entries: list[int], every: int, owners: int) -> None:
    """No owner has more than another by more than the largest layer, nor has a turn of an owner's. Who owns what is the
    same however many turns there are."""
    owner_of = owners_of(entries, owners)
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
