"""The member whose state the others adopt."""

from __future__ import annotations

from atoll.agent.runtime.membership.member_positions import newest_rank


def test_a_joiner_never_donates_and_of_others_the_newest_does() -> None:
    """Rows: whether the member has the state of a whole step, and which."""
    assert newest_rank([[1, 4], [1, 6], [0, 9], [1, 6]]) == 1
    assert newest_rank([[0, 9], [1, 0]]) == 1
    assert newest_rank([[0, 9], [0, 0]]) is None
