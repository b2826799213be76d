from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.controller.planners.batches.splits import EvenInput, split_evenly
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NoFeasiblePlan


def run(text: str) -> object:
    return json.loads(PLANNERS["even"].run_json(text))


def test_the_remainder_goes_to_the_first_nodes() -> None:
    assert run('{"total_batch": 256, "nodes": 3}') == {"batches": [86, 85, 85]}


def test_fewer_samples_than_nodes_leave_some_empty() -> None:
    assert run('{"total_batch": 2, "nodes": 3}') == {"batches": [1, 1, 0]}


def test_bounds_are_kept_and_the_rest_is_even() -> None:
    text = '{"total_batch": 256, "nodes": [{"max_batch": 5}, {}, {"min_batch": 200}]}'
    assert run(text) == {"batches": [5, 51, 200]}


def test_bounds_that_cannot_hold_the_batch_are_refused() -> None:
    with pytest.raises(NoFeasiblePlan, match="total_batch = 10 does not fit the bounds, which allow 0 to 8 together"):
        run('{"total_batch": 10, "nodes": [{"max_batch": 4}, {"max_batch": 4}]}')


@pytest.mark.parametrize("nodes", ["0", "-1", "1.5", "true", "[]", "null", '[{"max": 3}]', '"3"', "1000000000"])
def test_senseless_nodes_are_refused(nodes: str) -> None:
    with pytest.raises(BadInput, match="nodes"):
        run(f'{{"total_batch": 8, "nodes": {nodes}}}')


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12), st.data())
def test_any_feasible_split_sums_up_within_bounds_and_is_level(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    bounds = tuple(Bounds(min_batch=low, max_batch=low + more) for low, more in sizes)
    most = sum(low + more for low, more in sizes)
    assume(most > 0)
    total = data.draw(st.integers(max(1, sum(b.min_batch for b in bounds)), most))
    batches = split_evenly(EvenInput(total_batch=total, nodes=bounds)).batches
    assert sum(batches) == total
    assert all(b.min_batch <= n <= b.ceiling(total) for n, b in zip(batches, bounds, strict=True))
    may_grow = [n for n, b in zip(batches, bounds, strict=True) if n < b.ceiling(total)]
    may_shrink = [n for n, b in zip(batches, bounds, strict=True) if n > b.min_batch]
    assert not may_grow or not may_shrink or max(may_shrink) - min(may_grow) <= 1
