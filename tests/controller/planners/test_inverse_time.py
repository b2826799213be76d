from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.controller.planners.batches.splits import InverseTimeInput, TimedNode, split_by_inverse_time
from atoll.controller.planners.batches.water_filling import Bounds
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NoFeasiblePlan

TIMES = st.floats(1e-5, 1e3)


def timed(total: int, times: Sequence[float], bounds: Sequence[Bounds]) -> InverseTimeInput:
    nodes = (TimedNode(seconds_per_sample=time_s, **dict(b)) for time_s, b in zip(times, bounds, strict=True))
    return InverseTimeInput(total_batch=total, nodes=tuple(nodes))


def run(total: Any, *nodes: Any) -> Any:
    return json.loads(PLANNERS["inverse-time"].run_json(json.dumps({"total_batch": total, "nodes": nodes})))


def test_a_device_twice_as_fast_gets_twice_the_samples() -> None:
    plan = run(300, {"seconds_per_sample": 0.001}, {"seconds_per_sample": 0.002})
    assert plan == {"batches": [200, 100], "continuous": [pytest.approx(200), pytest.approx(100)], "step_time": 0.2}


def test_equal_devices_share_evenly() -> None:
    assert run(10, *[{"seconds_per_sample": 0.1}] * 4)["batches"] == [3, 3, 2, 2]


def test_what_does_not_fit_one_device_goes_to_the_others() -> None:
    plan = run(
        100, {"seconds_per_sample": 0.001, "max_batch": 10}, {"seconds_per_sample": 1}, {"seconds_per_sample": 2}
    )
    assert plan["batches"] == [10, 60, 30]


def test_a_slow_device_keeps_its_least_batch() -> None:
    assert run(10, {"seconds_per_sample": 0.001}, {"seconds_per_sample": 50, "min_batch": 1})["batches"] == [9, 1]


def test_infeasible_bounds_name_what_they_allow() -> None:
    with pytest.raises(NoFeasiblePlan, match="total_batch = 9 does not fit the bounds, which allow 10 to 18 together"):
        run(9, {"seconds_per_sample": 1, "min_batch": 5}, {"seconds_per_sample": 1, "min_batch": 5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "is not JSON"),
        ('{"total_batch": 4}', "field 'nodes' is missing"),
        ('{"total_batch": 4, "nodes": [], "extra": 1}', "unknown field 'extra'"),
        ('{"total_batch": 4, "nodes": [{"seconds_per_sample": 1, "speed": 2}]}', r"unknown field 'nodes\[0\].speed'"),
        ('{"total_batch": 4, "nodes": [{}]}', r"field 'nodes\[0\].seconds_per_sample' is missing"),
        ('{"total_batch": 4, "nodes": [{"seconds_per_sample": NaN}]}', r"nodes\[0\].seconds_per_sample = nan is wrong"),
        (
            '{"total_batch": 4, "nodes": [{"seconds_per_sample": Infinity}]}',
            "should be less than or equal to 10",
        ),
        (
            '{"total_batch": 4, "nodes": [{"seconds_per_sample": 1e999}]}',
            "should be less than or equal to 10",
        ),
        ('{"total_batch": 4, "nodes": [{"seconds_per_sample": -1}]}', r"nodes\[0\].seconds_per_sample = -1"),
        (
            '{"total_batch": 4, "nodes": [{"seconds_per_sample": 0}]}',
            "be greater than or equal to 0.000000000001",
        ),
        (
            '{"total_batch": 4, "nodes": [{"seconds_per_sample": "1"}]}',
            "= '1' is wrong: it should be a valid number",
        ),
        ('{"total_batch": true, "nodes": [{"seconds_per_sample": 1}]}', "total_batch = True"),
        ('{"total_batch": 4.0, "nodes": [{"seconds_per_sample": 1}]}', "total_batch = 4.0"),
        ('{"total_batch": 4, "nodes": [{"seconds_per_sample": 1, "min_batch": -1}]}', "min_batch = -1"),
        (
            '{"total_batch": 4, "nodes": [{"seconds_per_sample": 1, "min_batch": 5, "max_batch": 2}]}',
            "less than its min",
        ),
        ('{"total_batch": 4, "nodes": [7]}', r"nodes\[0\] = 7 is wrong: it should be an object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_bad_input_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        PLANNERS["inverse-time"].run_json(text)


def test_the_same_input_gives_the_same_bytes() -> None:
    text = '{"nodes": [{"seconds_per_sample": 0.1}, {"seconds_per_sample": 0.3}], "total_batch": 17}'
    spaced = '{ "total_batch" : 17,\n "nodes": [{"seconds_per_sample": 0.1}, {"seconds_per_sample": 0.3}]}'
    assert PLANNERS["inverse-time"].run_json(text) == PLANNERS["inverse-time"].run_json(spaced)
    assert list(json.loads(PLANNERS["inverse-time"].run_json(text))) == ["batches", "continuous", "step_time"]


def test_a_full_fast_node_leaves_no_rounding_error_behind() -> None:
    """The rates of the two differ by 4e7: a running sum of rates lost nine digits of the slow one's."""
    plan = run(1, {"seconds_per_sample": 441.75, "max_batch": 1}, {"seconds_per_sample": 1e-5, "max_batch": 0})
    assert plan == {"batches": [1, 0], "continuous": [pytest.approx(1, rel=1e-12), 0], "step_time": 441.75}


@given(st.lists(st.tuples(TIMES, st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4), st.data())
def test_no_other_whole_split_is_faster(nodes: list[tuple[float, int, int]], data: st.DataObject) -> None:
    """Against trying all splits."""
    times = tuple(t for t, _, _ in nodes)
    bounds = tuple(Bounds(min_batch=low, max_batch=low + more) for _, low, more in nodes)
    most = sum(b.max_batch or 0 for b in bounds)
    assume(most > 0)
    total = data.draw(st.integers(max(1, sum(b.min_batch for b in bounds)), most))
    plan = split_by_inverse_time(timed(total, times, bounds))
    ranges = [range(b.min_batch, (b.max_batch or 0) + 1) for b in bounds]
    splits = [split for split in itertools.product(*ranges) if sum(split) == total]
    best = min(max(b * t for b, t in zip(split, times, strict=True)) for split in splits)
    assert sum(plan.batches) == total
    assert plan.batches in splits
    assert plan.step_time == pytest.approx(best, rel=1e-12)
    assert math.fsum(plan.continuous) == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_a_thousand_nodes_get_the_whole_batch() -> None:
    """How long it takes: benchmarks/planners.py."""
    times = tuple(0.001 * (1 + i % 17) for i in range(1000))
    given_ = timed(100_000, times, (Bounds(min_batch=1),) * 1000)
    plan = split_by_inverse_time(given_)
    assert sum(plan.batches) == 100_000
