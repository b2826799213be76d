from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.pipelines.stage_order import EXACT_STAGES, F64, order_cost, shortest_order


def drawn(seed: int, count: int) -> F64:
    edge = np.random.default_rng(seed).exponential(1.0, (count, count))
    edge = edge + edge.T
    np.fill_diagonal(edge, 0.0)
    return edge


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_no_order_is_shorter(seed: int, count: int) -> None:
    edge = drawn(seed, count)
    order = shortest_order(edge)
    assert sorted(order) == list(range(count))
    best = min(order_cost(edge, one) for one in itertools.permutations(range(count)))
    assert order_cost(edge, order) == pytest.approx(best, rel=1e-12, abs=1e-12)


def test_stages_on_a_line_are_ordered_along_it_when_annealed() -> None:
    """30 stages at drawn places of a line, more than are ordered exactly: the least is from one end to the other."""
    place = np.sort(np.random.default_rng(3).uniform(0, 100, 30))
    shuffled = np.random.default_rng(4).permutation(place)
    order = shortest_order(np.abs(shuffled[:, None] - shuffled[None, :]))
    assert np.allclose(np.sort(shuffled[list(order)]), place)
    cost = order_cost(np.abs(shuffled[:, None] - shuffled[None, :]), order)
    assert cost <= 1.02 * (place[-1] - place[0])


def test_annealing_is_near_the_exact_order() -> None:
    """Where both can be had, annealing is within 2 % in the mean of two cases."""
    from atoll.controller.planners.pipelines import stage_order

    ratios = []
    for seed in range(2):
        edge = drawn(seed, EXACT_STAGES - 2)
        annealed = tuple(stage_order._annealed(edge))
        ratios.append(order_cost(edge, annealed) / order_cost(edge, shortest_order(edge)))
    assert min(ratios) > 1 - 1e-9
    assert float(np.mean(ratios)) < 1.02
