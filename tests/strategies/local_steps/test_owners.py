from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.strategies.shared_masters.owners import shared_out


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_turns_and_owners_carry_about_as_much(entries: list[int], every: int, owners: int) -> None:
    """No turn has more than another by more than the largest layer, nor has an owner in a turn."""
    routes = shared_out(entries, every, owners)
    largest = max(entries, default=0)
    turns = [sum(n for n, (turn, _) in zip(entries, routes, strict=True) if turn == one) for one in range(every)]
    assert max(turns) - min(turns) <= largest
    for turn in range(every):
        loads = [sum(n for n, route in zip(entries, routes, strict=True) if route == (turn, o)) for o in range(owners)]
        assert max(loads) - min(loads) <= largest


def test_all_owners_get_some_of_layers_alike() -> None:
    assert sorted(owner for _, owner in shared_out([5] * 8, 2, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
