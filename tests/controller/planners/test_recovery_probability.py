from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.checkpoint_placement.placement import recovery_probabilities


def by_trying(sizes: Sequence[int], replicas: int, lost: int) -> float:
    """Every set of lost machines, against every machine's holders."""
    holders, first = [], 0
    for size in sizes:
        holders += [{first + (i + j) % size for j in range(replicas)} for i in range(size)]
        first += size
    tried = [set(each) for each in itertools.combinations(range(first), lost)]
    return sum(not any(kept <= each for kept in holders) for each in tried) / len(tried)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_probabilities_are_those_of_trying_every_set_of_lost_machines(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 4))
    size = st.integers(replicas, 2 * replicas - 1)
    sizes = data.draw(st.lists(size, min_size=1, max_size=4).filter(lambda s: sum(s) <= 11))
    found = recovery_probabilities(sizes, replicas)
    assert len(found) == min(sum(sizes), 2 * replicas)
    assert found == pytest.approx([by_trying(sizes, replicas, k) for k in range(1, len(found) + 1)], rel=1e-14)


@given(st.integers(1, 40), st.integers(1, 6))
def test_fewer_losses_than_replicas_are_always_survived_and_the_bound_of_the_paper_holds(g: int, m: int) -> None:
    """Corollary 6.1: exact below 2m, a lower bound from there on."""
    found = dict(enumerate(recovery_probabilities([m] * g, m), 1))
    machines = g * m
    assert all(found[k] == 1.0 for k in range(1, m))
    for k in range(m, len(found) + 1):
        bound = max(0.0, 1 - g * math.comb(machines - m, k - m) / math.comb(machines, k))
        assert found[k] == pytest.approx(bound, abs=1e-12) if k < 2 * m else found[k] >= bound - 1e-12


@given(st.integers(2, 6), st.integers(1, 30), st.data())
def test_a_ring_is_within_the_gap_of_theorem_6_1(m: int, groups: int, data: st.DataObject) -> None:
    over = data.draw(st.integers(1, m - 1))
    machines = groups * m + over
    found = recovery_probabilities([m] * (groups - 1) + [m + over], m)[m - 1]
    best = 1 - math.ceil(machines / m) / math.comb(machines, m)
    assert best - (2 * m - 3) / math.comb(machines, m) - 1e-12 <= found <= best + 1e-12
