"""Whose state holds where members meet."""

from __future__ import annotations

from atoll.agent.runtime.membership.standpoints import newest


def test_a_joiner_never_donates_and_of_others_the_newest_does() -> None:
    """Rows: whether the member has the state of a whole step, and which."""
    assert newest([[1, 4], [1, 6], [0, 9], [1, 6]]) == 1
    assert newest([[0, 9], [1, 0]]) == 1
    assert newest([[0, 9], [0, 0]]) is None
