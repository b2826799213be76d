"""Which strategy reaches a loss soonest."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.deciding.strategy_candidates import candidates
from atoll.controller.planners.registry import STRATEGY
from atoll.controller.planners.strategy_choice.facts import (
    IslandLink,
    MeasuredIsland,
    MeasuredStep,
    RankTimes,
    StrategyInput,
)
from atoll.controller.planners.strategy_choice.strategy import StrategyPlan, plan_strategy

ENTRIES = 25_000_000
GBIT = 1e9


def asked(bandwidth_bps: float | None, *, islands: int = 4, compute_s: float = 0.5, **more: Any) -> StrategyInput:
    """Return equal islands of a rank each, all pairs joined by equal links; None: not measured."""
    names = [f"i{number}" for number in range(islands)]
    links = [(a, b) for a in names for b in names if a != b] if bandwidth_bps is not None else []
    given: dict[str, Any] = {
        "islands": tuple(
            MeasuredIsland(name=name, ranks=(RankTimes(compute_s=compute_s, batch=32),)) for name in names
        ),
        "links": tuple(IslandLink(source=a, target=b, bandwidth_bps=bandwidth_bps, rtt_s=0.001) for a, b in links),
        "entries": ENTRIES,
        "candidates": candidates({}),
    }
    return StrategyInput(**(given | more))


def step_s(plan: StrategyPlan, name: str) -> float:
    found = next(one.step_s for one in plan.candidates if one.name == name)
    assert found is not None
    return found


def test_a_fast_network_takes_dense_and_a_thin_one_local_steps() -> None:
    assert plan_strategy(asked(10 * GBIT)).strategy == "dense"
    thin = plan_strategy(asked(0.1 * GBIT))
    assert thin.strategy == "local-steps"
    # A ring of four sends 1.5 times the model: 150 MB over 12.5 MB/s, all but the first piece after the backward pass.
    assert step_s(thin, "dense") == pytest.approx(0.5 + 150e6 / 12.5e6, rel=0.05)
    assert step_s(thin, "local-steps") == 0.5
    assert thin.reason == (
        "local-steps: 0.5 s a step, 0.92 to 1.3× the steps; stale-sparse 0.5 s, 1.1 to 1.5× the steps; "
        "compressed 6.2 s; dense 12 s; one island alone 4× slower"
    )


def test_one_island_and_unknown_links_take_dense() -> None:
    assert plan_strategy(asked(GBIT, islands=1)).strategy == "dense"
    unknown = plan_strategy(asked(None))
    assert (unknown.strategy, unknown.reason) == ("dense", "dense: no link between the islands was measured")
    assert plan_strategy(asked(None, running="local-steps")).strategy == "local-steps"


def test_a_strategy_that_the_script_refuses_is_not_chosen() -> None:
    reason = "optimizer LBFGS calls its closure"
    plan = plan_strategy(asked(0.1 * GBIT, candidates=candidates({"local-steps": reason})))
    assert plan.strategy == "stale-sparse"
    refused = next(one for one in plan.candidates if one.name == "local-steps")
    assert (refused.step_s, refused.refused) == (None, reason)
    everything = {one.name: reason for one in candidates({}) if one.name not in ("dense", "compressed")}
    assert plan_strategy(asked(0.1 * GBIT, candidates=candidates(everything))).strategy == "compressed"


def test_a_sparse_model_takes_zen_if_its_nonzeros_are_few() -> None:
    few = plan_strategy(asked(GBIT, gradient_density=0.005, summed_density=0.01))
    assert few.strategy == "zen"
    assert plan_strategy(asked(GBIT, gradient_density=0.9)).strategy != "zen"
    unknown = next(one for one in plan_strategy(asked(GBIT)).candidates if one.name == "zen")
    assert unknown.refused == "no gradient is known to be sparse"


@pytest.mark.parametrize("running", ["dense", "local-steps"])
def test_a_running_strategy_is_left_for_a_clear_gain_alone(running: str) -> None:
    """Links between those where either clearly wins keep what runs."""
    rates = [10**exponent for exponent in (7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5)]
    chosen = [plan_strategy(asked(rate, running=running)).strategy for rate in rates]
    fresh = [plan_strategy(asked(rate)).strategy for rate in rates]
    assert chosen[0] == "local-steps"
    assert chosen.count(running) >= fresh.count(running)


def test_between_clear_gains_both_stay() -> None:
    """Dense takes 1.12 times as long as local-steps: within what the tasks of the race spread."""
    for running in ("dense", "local-steps"):
        measured = (MeasuredStep(strategy="dense", step_s=0.56),)
        plan = plan_strategy(asked(0.1 * GBIT, running=running, measured=measured))
        assert plan.strategy == running


def test_an_overhead_of_the_running_strategy_is_no_reason_to_leave_it() -> None:
    """At 10 Gbit/s dense was measured to take a fifth longer than its gradients explain: so would compressed."""
    measured = (MeasuredStep(strategy="dense", step_s=0.65),)
    plan = plan_strategy(asked(10 * GBIT, running="dense", measured=measured))
    assert plan.strategy == "dense"
    assert step_s(plan, "compressed") == pytest.approx(0.65, rel=0.01)


def test_a_measured_step_replaces_the_prediction() -> None:
    slow = (MeasuredStep(strategy="local-steps", step_s=20.0), MeasuredStep(strategy="stale-sparse", step_s=20.0))
    plan = plan_strategy(asked(0.1 * GBIT, running="local-steps", measured=slow))
    assert plan.strategy == "compressed"
    assert step_s(plan, "local-steps") == 20.0


def test_a_link_too_thin_for_enough_costs_local_steps_more_steps() -> None:
    plan = plan_strategy(asked(3e6))
    found = next(one for one in plan.candidates if one.name == "local-steps")
    assert found.steps is not None
    assert found.steps > 1.5
    assert found.least_steps is not None
    assert found.least_steps < found.steps


def test_it_is_quick_and_derived_again() -> None:
    given = asked(0.1 * GBIT, entries=10**11)
    decision = STRATEGY.decide(given)
    assert STRATEGY.run_json(decision.input) == decision.output
