from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from atoll.controller.planners.batches.optperf import (
    NodeModel,
    OptPerfInput,
    Overlap,
    optperf_of_totals,
    plan_optperf,
    step_times,
)
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import NoFeasiblePlan

PER_SAMPLE = st.one_of(st.just(0.0), st.floats(1e-4, 10))
FIXED = st.one_of(st.just(0.0), st.floats(0, 100))


@st.composite
def node_models(draw: st.DrawFn, widest: int = 400) -> NodeModel:
    q, k = draw(PER_SAMPLE), draw(PER_SAMPLE)
    low = draw(st.integers(0, 20))
    high = draw(st.one_of(st.none(), st.integers(low, low + widest)))
    return model(q if q + k > 0 else 1.0, draw(FIXED), k, draw(FIXED), low=low, high=high)


overlaps = st.builds(Overlap, gamma=st.one_of(st.just(0.0), st.floats(1e-3, 1)), t_o=FIXED, t_u=FIXED)


@st.composite
def clusters(draw: st.DrawFn) -> OptPerfInput:
    nodes = (*draw(st.lists(node_models(), max_size=7)), model(1, 0, 1, 0))
    low = sum(n.min_batch for n in nodes)
    high = sum(2000 if n.max_batch is None else n.max_batch for n in nodes)
    return of(draw(st.integers(max(low, 1), max(high, 1))), nodes, draw(overlaps))


def model(q: float, s: float, k: float, m: float, *, low: int = 0, high: int | None = None) -> NodeModel:
    return NodeModel(q=q, s=s, k=k, m=m, min_batch=low, max_batch=high)


def of(total: int, nodes: Sequence[NodeModel], overlap: Overlap) -> OptPerfInput:
    return OptPerfInput(total_batch=total, nodes=tuple(nodes), **dict(overlap))


def run(total: int, gamma: float, t_o: float, t_u: float, *nodes: dict[str, float]) -> Any:
    data = {"total_batch": total, "gamma": gamma, "t_o": t_o, "t_u": t_u, "nodes": nodes}
    return json.loads(PLANNERS["optperf"].run_json(json.dumps(data)))


def linear_program(case: OptPerfInput) -> float:
    """The same problem for a solver that knows nothing of its shape: least T with T >= every line of every node."""
    times, n = step_times(case.nodes, case), len(case.nodes)
    rows = np.zeros((2 * n, n + 1))
    for line in range(2):
        rows[line * n : (line + 1) * n, :n] = np.diag(times.slope_2N[line])
    rows[:, n] = -1
    solved = linprog(
        [0.0] * n + [1.0],
        A_ub=rows,
        b_ub=-times.offset_2N.ravel(),
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[case.total_batch],
        bounds=[(node.min_batch, node.max_batch) for node in case.nodes] + [(None, None)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)


def test_a_node_three_times_as_fast_gets_three_times_the_samples_where_computing_rules() -> None:
    plan = run(400, 0.1, 0.0, 0.01, {"q": 0.001, "s": 0, "k": 0.002, "m": 0}, {"q": 0.003, "s": 0, "k": 0.006, "m": 0})
    assert plan["batches"] == [300, 100]
    assert plan["bottlenecks"] == ["compute", "compute"]
    assert plan["step_time"] == pytest.approx(0.91)


def test_where_communication_rules_only_the_start_of_synchronisation_is_made_equal() -> None:
    """a + gamma P is equal: 0.001 b + 0.5 * 0.002 b against 0.001 b + 0.5 * 0.006 b, so 2 : 1, not 7 : 3."""
    plan = run(300, 0.5, 5.0, 0.1, {"q": 0.001, "s": 0, "k": 0.002, "m": 0}, {"q": 0.001, "s": 0, "k": 0.006, "m": 0})
    assert plan["batches"] == [200, 100]
    assert plan["bottlenecks"] == ["communication", "communication"]
    assert plan["optperf"] == pytest.approx(5.5)


def test_both_kinds_of_node_in_one_step() -> None:
    """The first is quick to load and slow backward: it ends after its own computing, the second with communication."""
    plan = run(150, 0.2, 0.5, 0.1, {"q": 0.001, "s": 0, "k": 0.009, "m": 0}, {"q": 0.009, "s": 0, "k": 0.001, "m": 0})
    assert plan["bottlenecks"] == ["compute", "communication"]
    assert plan["continuous"][0] * 0.01 + 0.1 == pytest.approx(plan["optperf"])
    assert plan["continuous"][1] * 0.0092 + 0.6 == pytest.approx(plan["optperf"])


def test_a_fixed_cost_lowers_the_share() -> None:
    plan = run(100, 1.0, 0.0, 0.0, {"q": 0.01, "s": 0, "k": 0, "m": 0}, {"q": 0.01, "s": 0.2, "k": 0, "m": 0})
    assert plan["batches"] == [60, 40]


def test_a_node_whose_fixed_cost_rules_the_step_gets_nothing_and_the_rest_stays_level() -> None:
    plan = run(
        90,
        1.0,
        0.0,
        0.0,
        {"q": 0.01, "s": 0, "k": 0, "m": 0},
        {"q": 0.02, "s": 0, "k": 0, "m": 0},
        {"q": 1, "s": 9, "k": 0, "m": 0},
    )
    assert plan["batches"] == [60, 30, 0]
    assert plan["optperf"] == plan["step_time"] == 9


def test_bounds_are_kept_and_the_others_take_the_rest() -> None:
    fast, slow = {"q": 0.001, "s": 0, "k": 0, "m": 0}, {"q": 1, "s": 0, "k": 0, "m": 0}
    assert run(100, 0, 0, 0, fast | {"max_batch": 10}, slow, slow | {"min_batch": 60})["batches"] == [10, 30, 60]


def test_a_batch_beyond_the_bounds_is_infeasible_and_says_so() -> None:
    with pytest.raises(NoFeasiblePlan, match="total_batch = 9 does not fit the bounds, which allow 2 to 8 together"):
        plan_optperf(of(9, (model(1, 0, 1, 0, low=1, high=4),) * 2, Overlap(gamma=0.5, t_o=0, t_u=0)))


@settings(max_examples=50, deadline=None)
@given(clusters())
def test_the_optimum_equals_that_of_a_linear_program(case: OptPerfInput) -> None:
    plan = plan_optperf(case)
    assert plan.optperf == pytest.approx(linear_program(case), rel=1e-9, abs=1e-9)
    assert sum(plan.continuous) == pytest.approx(case.total_batch, rel=1e-9)
    times = step_times(case.nodes, case)
    assert (times.at(np.array(plan.continuous)) <= plan.optperf * (1 + 1e-9)).all()
    assert all(
        node.min_batch <= b <= node.ceiling(case.total_batch) for node, b in zip(case.nodes, plan.batches, strict=True)
    )
    assert sum(plan.batches) == case.total_batch
    assert plan.step_time >= plan.optperf * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(node_models(widest=5), min_size=1, max_size=4), overlaps, st.integers(0, 12))
def test_no_other_whole_split_is_faster(nodes: list[NodeModel], overlap: Overlap, more: int) -> None:
    """Against trying all splits of what is beyond the least batches."""
    low = [n.min_batch for n in nodes]
    room = [12 if n.max_batch is None else n.max_batch - n.min_batch for n in nodes]
    more = max(min(more, sum(room)), 0 if sum(low) else 1)
    if more > sum(room):
        return
    times = step_times(nodes, overlap)
    ranges = [range(least, least + width + 1) for least, width in zip(low, room, strict=True)]
    splits = [split for split in itertools.product(*ranges) if sum(split) == sum(low) + more]
    best = min(float(times.at(np.array(split, dtype=np.float64)).max()) for split in splits)
    plan = plan_optperf(of(sum(low) + more, nodes, overlap))
    assert plan.step_time == pytest.approx(best, rel=1e-12)


@settings(deadline=None)
@given(
    st.lists(node_models(), min_size=1, max_size=6), overlaps, st.lists(st.integers(1, 3000), min_size=1, max_size=9)
)
def test_many_totals_at_once_give_what_each_gives_alone(
    nodes: list[NodeModel], overlap: Overlap, totals: list[int]
) -> None:
    together = optperf_of_totals(nodes, overlap, totals)
    for total, found in zip(totals, together.tolist(), strict=True):
        try:
            alone = plan_optperf(of(total, nodes, overlap)).optperf
        except NoFeasiblePlan:
            assert np.isnan(found)
        else:
            assert found == pytest.approx(alone, rel=1e-12)


def test_speeds_eighteen_decades_apart_are_planned_exactly() -> None:
    """Running sums over the breakpoints lose everything here; what they guess is checked and corrected."""
    nodes = tuple(
        model(10.0 ** -(i % 10), 10.0 ** (i % 7 - 3), 10.0 ** -((i * 7) % 10), 0, high=10 ** (i % 12))
        for i in range(60)
    )
    case = of(10**9, nodes, Overlap(gamma=0.3, t_o=1.0, t_u=0.1))
    plan = plan_optperf(case)
    assert sum(plan.batches) == 10**9
    assert plan.optperf <= plan.step_time <= plan.optperf * (1 + 1e-6) + 10
    assert sum(plan.continuous) == pytest.approx(1e9, rel=1e-9)


@pytest.mark.parametrize("gamma", [5e-324, 1e-300, 1e-15, 1e-12, 1e-9])
def test_a_line_that_is_all_but_flat_is_no_trouble(gamma: float) -> None:
    nodes = (model(0, 1, 0.01, 0), model(0.01, 0, 0.01, 0), model(0, 0.5, 0.02, 0))
    plan = plan_optperf(of(500, nodes, Overlap(gamma=gamma, t_o=3.0, t_u=0.5)))
    flat = plan_optperf(of(500, nodes, Overlap(gamma=0.0, t_o=3.0, t_u=0.5)))
    assert sum(plan.batches) == 500
    assert plan.step_time == pytest.approx(flat.step_time, rel=1e-9)
    assert plan.optperf == pytest.approx(flat.optperf, rel=1e-9)


def test_step_times_of_a_hundred_candidates_on_a_thousand_nodes_ascend() -> None:
    """How long it takes: benchmarks/planners.py."""
    rng = np.random.default_rng(1)
    nodes = [model(*(rng.uniform(0.1, 1, 4) * 1e-3).tolist(), low=1) for _ in range(1000)]
    totals = np.geomspace(2000, 500_000, 100).astype(int).tolist()
    found = optperf_of_totals(nodes, Overlap(gamma=0.2, t_o=0.05, t_u=0.01), totals)
    assert (np.diff(found) >= 0).all()
