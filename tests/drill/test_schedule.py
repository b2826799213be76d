from __future__ import annotations

import math
from collections import Counter

import pytest

from atoll.errors import BadInput
from drill.schedule import KINDS, Strike, plan


def test_the_same_seed_gives_the_same_strikes_and_another_gives_others() -> None:
    assert plan(tuple(KINDS), 600, 20, seed=3) == plan(tuple(KINDS), 600, 20, seed=3)
    assert plan(tuple(KINDS), 600, 20, seed=3) != plan(tuple(KINDS), 600, 20, seed=4)


def test_one_strike_in_each_span_and_the_last_span_is_left_for_recovering() -> None:
    planned = plan(tuple(KINDS), 600, 20, seed=1)
    assert [int(one.at_s // 20) for one in planned] == list(range(29))


def test_every_strike_comes_equally_often_and_a_kind_named_twice_counts_once() -> None:
    planned = plan(("stops", "leader", "stops"), 20 * (4 * 5 + 1), 20, seed=1)
    expected = {Strike.WORKER_STOP: 5, Strike.MACHINE_STOP: 5, Strike.LEADER_STOP: 5, Strike.LEADER: 5}
    assert Counter(one.strike for one in planned) == expected


def test_a_stop_outlasts_two_leases_and_a_recovery_is_struck_within_a_second() -> None:
    planned = plan(tuple(KINDS), 12_000, 20, seed=1)
    assert min(one.away_s for one in planned if one.strike is Strike.MACHINE_STOP) >= 8
    assert max(one.then_s for one in planned) <= 1
    assert all(0 <= one.draw < 1 for one in planned)


@pytest.mark.parametrize(
    ("kinds", "length_s", "every_s", "word"),
    [
        (("workers", "meteors"), 60, 20, "meteors"),
        ((), 60, 20, "no kind"),
        (("workers",), 60, 4, "5 s at least"),
        (("workers",), 30, 20, "twice"),
        (("workers",), math.nan, 20, "twice"),
        (("workers",), 60, math.nan, "every nan"),
        (("workers",), math.inf, 20, "At most"),
    ],
)
def test_what_cannot_be_planned_is_refused(kinds: tuple[str, ...], length_s: float, every_s: float, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        plan(kinds, length_s, every_s, seed=1)
