from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.pipelines.allocation import (
    AllocationDevice,
    AllocationInput,
    AllocationPlan,
    layers_by_power,
    plan_allocation,
    stage_for,
)
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NoFeasiblePlan


@st.composite
def clusters(draw: st.DrawFn) -> AllocationInput:
    count = draw(st.integers(1, 7))
    noise = np.random.default_rng(draw(st.integers(0, 10**6)))
    reliable = [True, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    return AllocationInput(
        devices=tuple(AllocationDevice(power=float(noise.uniform(0.5, 8)), reliable=one) for one in reliable),
        delay=tuple(tuple(row) for row in noise.uniform(0, 0.2, (count, count)).tolist()),
        bandwidth=tuple(tuple(row) for row in noise.uniform(1e6, 1e8, (count, count)).tolist()),
        activation_bytes=draw(st.integers(0, 10**7)),
        layer_costs=tuple(noise.uniform(0.1, 2, draw(st.integers(1, 12))).tolist()),
        parameter_bytes=draw(st.integers(0, 10**9)),
        batch=draw(st.integers(1, 256)),
    )


def edge(case: AllocationInput, i: int, j: int) -> float:
    sent = case.activation_bytes / case.bandwidth[i][j] + case.activation_bytes / case.bandwidth[j][i]
    return case.delay[i][j] + case.delay[j][i] + sent


def mean_edge(case: AllocationInput, some: Sequence[int], others: Sequence[int]) -> float:
    return float(np.mean([edge(case, i, j) for i in some for j in others]))


def servers(plan: AllocationPlan) -> list[list[int]]:
    return [sorted({*stage.frontal, *stage.backward}) for stage in plan.stages]


@settings(max_examples=50, deadline=None)
@given(clusters())
def test_every_device_and_layer_has_one_place_and_no_order_of_the_stages_is_shorter(case: AllocationInput) -> None:
    """1. Each reliable device serves one stage, each volunteer helps one, each layer is in one. 2. No order of these
    stages has a smaller cost. 3. A volunteer's stage is that of the least mean edge."""
    plan = plan_allocation(case)
    held = servers(plan)
    assert sorted(i for one in held for i in one) == [i for i, d in enumerate(case.devices) if d.reliable]
    assert sorted(i for s in plan.stages for i in s.clients) == [
        i for i, d in enumerate(case.devices) if not d.reliable
    ]
    assert [i for s in plan.stages for i in range(s.layers[0], s.layers[1] + 1)] == list(range(len(case.layer_costs)))
    for stage in plan.stages:
        assert stage.frontal
        assert stage.backward
        assert set(stage.frontal).isdisjoint(stage.backward) or stage.frontal == stage.backward == stage.frontal[:1]

    def cost(order: Sequence[Sequence[int]]) -> float:
        return sum(mean_edge(case, one, other) for one, other in itertools.pairwise(order))

    assert plan.order_cost == pytest.approx(cost(held), rel=1e-9, abs=1e-12)
    assert plan.order_cost <= min(cost(order) for order in itertools.permutations(held)) * (1 + 1e-9) + 1e-12
    for stage, own in zip(plan.stages, held, strict=True):
        for client in stage.clients:
            nearest = min(mean_edge(case, [client], other) for other in held)
            assert mean_edge(case, [client], own) <= nearest * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 5), min_size=1, max_size=9),
    st.lists(st.floats(0.1, 5), min_size=1, max_size=4),
)
def test_no_cut_of_the_layers_has_a_faster_slowest_stage(costs: list[float], powers: list[float]) -> None:
    powers = powers[: len(costs)]
    found = layers_by_power(np.array(costs), np.array(powers))

    def slowest(cuts: Sequence[int]) -> float:
        ends = itertools.pairwise((0, *cuts, len(costs)))
        return max(sum(costs[begin:end]) / power for (begin, end), power in zip(ends, powers, strict=True))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(costs)), len(powers) - 1))
    assert slowest([first for first, _ in found[1:]]) == pytest.approx(best, rel=1e-9)


def test_of_equal_slowest_stages_the_cut_is_that_in_proportion() -> None:
    """Seven layers on three equal stages: 3 layers somewhere; never 1, 3, 3."""
    found = layers_by_power(np.ones(7), np.ones(3))
    assert sorted(last - first + 1 for first, last in found) == [2, 2, 3]


def sites(sizes: Sequence[int], between_s: float, volunteers: Sequence[int] = (), **changed: Any) -> AllocationInput:
    """Sites of equal reliable devices, 1 ms and 1 GB/s within, `between_s` and 10 MB/s between neighbours on a line;
    a volunteer for each site number in `volunteers`."""
    at = [place for place, size in enumerate(sizes) for _ in range(size)] + list(volunteers)
    delay = [[0.001 if i == j else between_s * abs(i - j) for j in at] for i in at]
    bandwidth = [[1e9 if i == j else 1e7 for j in at] for i in at]
    reliable = sum(sizes)
    given: dict[str, Any] = {
        "devices": [{"power": 10.0, "reliable": place < reliable} for place in range(len(at))],
        "delay": delay,
        "bandwidth": bandwidth,
        "activation_bytes": 1_000_000,
        "layer_costs": [1.0] * 12,
        "parameter_bytes": 0,
        "batch": 100,
    }
    return AllocationInput.model_validate_json(json.dumps(given | changed))


def test_sites_become_stages_in_the_order_of_the_line() -> None:
    """Three sites of two, and three layers: clusters are sites, volunteers help at their own one."""
    plan = plan_allocation(sites((2, 2, 2), between_s=0.3, volunteers=(1, 2), layer_costs=[4.0] * 3))
    assert servers(plan) == [[0, 1], [2, 3], [4, 5]]
    assert [stage.clients for stage in plan.stages] == [(), (6,), (7,)]


def test_layers_go_by_the_power_of_servers_and_volunteers() -> None:
    """Two sites of one device, and two volunteers at the second: 20 layers as 1 : 3."""
    plan = plan_allocation(sites((1, 1), between_s=0.1, volunteers=(1, 1), layer_costs=[1.0] * 20))
    assert [stage.layers for stage in plan.stages] == [(0, 4), (5, 19)]


def test_what_is_far_apart_for_its_computing_is_one_stage() -> None:
    """A step computes for 0.05 s, the other site is 3 s away: no stage pays for the way."""
    plan = plan_allocation(sites((1, 1), between_s=3.0, batch=1))
    assert [(stage.frontal, stage.backward) for stage in plan.stages] == [((0,), (1,))]


def test_aggregation_of_a_large_model_over_a_thin_link_divides_a_stage() -> None:
    """The same, and 10 GB of parameters, which servers of one stage would average over 10 MB/s."""
    plan = plan_allocation(sites((1, 1), between_s=3.0, batch=1, parameter_bytes=10**10))
    assert len(plan.stages) == 2


def test_a_middle_stages_servers_stand_on_the_side_of_their_neighbour() -> None:
    """Devices 1 and 2 hold the middle stage: 1 is near 0, 2 is near 3."""
    at = [0.0, 0.4, 0.5, 0.9]
    delay = [[abs(i - j) for j in at] for i in at]
    delay[1][2] = delay[2][1] = 0.0001
    case = sites((4,), between_s=0.0, batch=10_000).model_copy(update={"delay": tuple(map(tuple, delay))})
    plan = plan_allocation(case.model_copy(update={"layer_costs": (1.0,) * 3}))
    assert [(stage.frontal, stage.backward) for stage in plan.stages] == [((0,), (0,)), ((1,), (2,)), ((3,), (3,))]


def test_stages_are_no_more_than_layers_or_reliable_devices() -> None:
    assert len(plan_allocation(sites((1,) * 6, between_s=0.0001, layer_costs=[1e6] * 4)).stages) == 4
    assert len(plan_allocation(sites((1,) * 3, between_s=0.0001, layer_costs=[1e6] * 40)).stages) == 3


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"devices": [{"power": 0, "reliable": True}, {"power": 1, "reliable": True}]}, r"devices\[0\].power"),
        ({"delay": [[0, 0]]}, "delay has 1 rows, and there are 2 devices"),
        ({"bandwidth": [[1, 1], [1]]}, r"bandwidth\[1\] has 1 entries"),
        ({"layer_costs": []}, "layer_costs"),
        ({"batch": 0}, "batch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changed: dict[str, Any], why: str) -> None:
    case = sites((1, 1), between_s=0.1).model_dump(mode="json")
    with pytest.raises(BadInput, match=why):
        PLANNERS["allocation"].run_json(json.dumps(case | changed))


def test_devices_that_cannot_reach_each_other_have_no_plan() -> None:
    """1. Two reliable ones without a link. 2. None reliable. 3. A volunteer that reaches a part of each stage."""
    apart = sites((1, 1), between_s=0.1)
    with pytest.raises(NoFeasiblePlan, match="devices 0 and 1 are reliable and have no link both ways"):
        plan_allocation(apart.model_copy(update={"bandwidth": ((1e9, 0.0), (1e7, 1e9))}))
    with pytest.raises(NoFeasiblePlan, match="none of 1 devices is reliable"):
        plan_allocation(sites((), between_s=0.1, volunteers=(0,)))
    helped = sites((1,), between_s=0.1, volunteers=(0,))
    with pytest.raises(NoFeasiblePlan, match="device 1, a volunteer, has links to all servers of no stage"):
        plan_allocation(helped.model_copy(update={"bandwidth": ((0.0, 0.0), (0.0, 0.0))}))


def test_a_volunteer_helps_the_nearest_stage_and_of_given_layers_the_one_that_is_missed_more() -> None:
    assert stage_for([0.3, 0.1, 0.1]) == 1
    assert stage_for([0.3, 0.1, 0.1], [1.0, 4.0, 2.0]) == 2
    assert stage_for([0.3, 0.1, 0.1], [0.5, 4.0, 2.0]) == 0
