"""Whether one island with all the data is sooner than all together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.controller.planners.islands.one_island import (
    MIN_SAVING,
    Exchange,
    IslandTimes,
    OneIslandInput,
    compare_one_island,
)
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput

HOME = IslandTimes(name="home", batch=64, compute_s=0.4)
LAB = IslandTimes(name="lab", batch=192, compute_s=0.4)


def asked(*islands: IslandTimes, **fields: Any) -> OneIslandInput:
    return OneIslandInput(islands=islands or (HOME, LAB), **fields)


def over(bandwidth: float, hidden: float = 0.0) -> Exchange:
    return Exchange(bytes=1e8, bandwidth=bandwidth, hidden=hidden)


def test_alone_the_fastest_island_computes_the_whole_batch() -> None:
    planned = compare_one_island(asked(step_s=0.9))
    assert (planned.island, planned.alone_s) == ("lab", pytest.approx(256 * 0.4 / 192))
    assert (planned.together_s, planned.sooner) == (0.9, True)


@pytest.mark.parametrize(
    ("bandwidth", "hidden", "step_s"),
    [
        (1e12, 0.0, 0.4),  # a fast network: the step is computing
        (1e9, 0.0, 0.5),  # 0.1 s after it
        (1e9, 0.5, 0.4),  # beside it
        (1e8, 0.5, 1.2),  # 1 s, of which 0.2 beside it
        (1e8, 1.0, 1.0),  # a step late: only the link counts
    ],
)
def test_a_step_together_takes_what_the_link_needs_beyond_what_it_hides(
    bandwidth: float, hidden: float, step_s: float
) -> None:
    assert compare_one_island(asked(exchange=over(bandwidth, hidden))).together_s == pytest.approx(step_s, rel=1e-3)


def test_a_measured_step_is_believed_over_a_predicted_one() -> None:
    assert compare_one_island(asked(exchange=over(1e6), step_s=0.41)).together_s == 0.41


def test_it_is_sooner_only_clearly_and_beyond_what_is_unsure() -> None:
    alone_s = compare_one_island(asked(step_s=1.0)).alone_s
    just = alone_s / (1 - MIN_SAVING)
    assert compare_one_island(asked(step_s=just * 1.001)).sooner
    assert not compare_one_island(asked(step_s=just * 0.999)).sooner
    assert not compare_one_island(asked(step_s=just * 1.001, uncertainty=0.01)).sooner
    assert not compare_one_island(asked(step_s=just * 1.001, beside_s=0.01)).sooner


def test_steps_that_teach_less_count_for_more() -> None:
    planned = compare_one_island(asked(step_s=0.5, steps=1.5))
    assert (planned.together_s, planned.sooner) == (0.75, True)
    assert not compare_one_island(asked(step_s=0.5)).sooner


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"islands": [{"name": "a", "batch": 1, "compute_s": 1}], "step_s": 1}, "islands"),
        ({"step_s": 0}, "step_s = 0 is wrong"),
        ({"exchange": {"bytes": 1, "bandwidth": 0, "hidden": 0}}, r"exchange.bandwidth = 0 is wrong"),
        ({}, "field 'exchange' is missing"),
    ],
)
def test_one_island_no_time_and_no_bandwidth_are_refused(given: dict[str, Any], text: str) -> None:
    islands = [one.model_dump() for one in (HOME, LAB)]
    with pytest.raises(BadInput, match=text):
        PLANNERS["one-island"].run_json(json.dumps({"islands": islands} | given))
