"""Order the stages of a pipeline so that neighbours are near: an open travelling salesman."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

EXACT_STAGES: Final = 12
"""Number of stages up to which the order is exact: 2^12 sets of stages are a few milliseconds."""

ANNEALING_ROUNDS: Final = 40_000
ANNEALING_SEED: Final = 0

F64 = NDArray[np.float64]


def shortest_order(edge_PP: F64) -> tuple[int, ...]:
    """Return the order of stages with the least sum of edges between neighbours. Of an order and its reverse, return
    the one that begins with the smaller number.

    edge_PP: float64 [P, P], symmetric, finite, at least 0. Exact up to EXACT_STAGES (Held and Karp, 1962). Beyond that
    simulated annealing with a fixed seed: the same edges have the same order."""
    count = len(edge_PP)
    if count <= 1:
        return tuple(range(count))
    order = _exact(edge_PP) if count <= EXACT_STAGES else _annealed(edge_PP)
    return order if order[0] < order[-1] else order[::-1]


def order_cost(edge_PP: F64, order: tuple[int, ...]) -> float:
    """Return the sum of edges between neighbours."""
    return math.fsum(float(edge_PP[i, j]) for i, j in pairwise(order))


def _exact(edge_PP: F64) -> tuple[int, ...]:
    """Order exactly. reached[visited, last]: the least cost of visiting a set of stages, ending at one of them."""
    count = len(edge_PP)
    reached = np.full((1 << count, count), np.inf)
    before = np.zeros((1 << count, count), dtype=np.intp)
    for one in range(count):
        reached[1 << one, one] = 0.0
    for visited in range(1, 1 << count):
        onward_PP = reached[visited][:, None] + edge_PP
        best_P, from_P = onward_PP.min(axis=0), onward_PP.argmin(axis=0)
        for after in range(count):
            larger = visited | (1 << after)
            if larger != visited and best_P[after] < reached[larger, after]:
                reached[larger, after] = best_P[after]
                before[larger, after] = from_P[after]
    visited = (1 << count) - 1
    last, order = int(reached[visited].argmin()), []
    while visited:
        order.append(last)
        visited, last = visited ^ (1 << last), int(before[visited, last])
    return tuple(order)


def _annealed(edge_PP: F64) -> tuple[int, ...]:
    """Order by simulated annealing: reverse pieces of the order, worse ones less and less often."""
    draw, count = np.random.default_rng(ANNEALING_SEED), len(edge_PP)
    order = _nearest_first(edge_PP)
    best, cost = list(order), order_cost(edge_PP, tuple(order))
    least = cost
    hot = max(cost / (count - 1), 1e-12)
    one, other = draw.integers(count, size=ANNEALING_ROUNDS), draw.integers(count - 1, size=ANNEALING_ROUNDS)
    other += other >= one  # any two that are not the same
    first, last = np.minimum(one, other).tolist(), np.maximum(one, other).tolist()
    luck = draw.random(ANNEALING_ROUNDS).tolist()
    edge = edge_PP.tolist()
    for round_, (i, j) in enumerate(zip(first, last, strict=True)):
        change = _change(edge, order, i, j)
        heat = hot * (1 - round_ / ANNEALING_ROUNDS) ** 3 + 1e-15
        if change < 0 or luck[round_] < math.exp(-change / heat):
            order[i : j + 1] = order[i : j + 1][::-1]
            cost += change
            if cost < least - 1e-12:
                best, least = list(order), cost
    return tuple(best)


def _nearest_first(edge_PP: F64) -> list[int]:
    order, left = [0], set(range(1, len(edge_PP)))
    while left:
        order.append(min(left, key=lambda one: (edge_PP[order[-1], one], one)))
        left.remove(order[-1])
    return order


def _change(edge: Sequence[Sequence[float]], order: list[int], i: int, j: int) -> float:
    """Return the change of the cost if order[i..j] is reversed."""
    change = 0.0
    if i > 0:
        change += edge[order[i - 1]][order[j]] - edge[order[i - 1]][order[i]]
    if j < len(order) - 1:
        change += edge[order[i]][order[j + 1]] - edge[order[j]][order[j + 1]]
    return change
