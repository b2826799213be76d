"""The density of strategy local-steps as links and devices ask for, and what its plans say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_runs import EVEN, given, ranks

from atoll.controller.deciding.given import Given, Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.planners.islands.exchange_density import Drift, ExchangeDensityInput, plan_exchange_density
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import JobPins, PlanRecord
from atoll.strategies.local_steps.controller import FILLED, RISES_AFTER_S, LocalStepsController
from atoll.strategies.local_steps.exchange_estimator import DriftEstimate, ExchangeEstimate
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.stale_sparse.sparsity_cost import SparsityCostEstimate

ISLANDS = ("paris", "lyon", "nice")
LIKE = (0.002, 0.002, 0.002)
COST = SparsityCostEstimate(dense_s=0.5, error_s=0.01)
FOLLOWING = Policy(half=LocalStepsController(LocalSteps()), adapts=("density",), split="even")


ALL = replace(FOLLOWING, adapts=("density", "every", "staleness"))


def seen(**measured: float) -> ExchangeEstimate:
    return ExchangeEstimate(cost=None, drift=None, **measured)


def run(mbit: float, current: PlanRecord = EVEN, policy: Policy = FOLLOWING, **changes: object) -> Given:
    links = dict.fromkeys(ISLANDS, 480e6) | {"lyon": mbit * 1e6}
    seen = ranks(*LIKE, plan=current.id)
    return given(seen, current=current, policy=policy, links=links, islands=ISLANDS, **changes)  # type: ignore[arg-type]


def test_the_density_follows_the_thinnest_link_over_a_trace_and_says_why() -> None:
    """1. The link of one island falls, and falls again, and comes back. 2. Each plan fills it to 60 to 80 % of a step;
    none comes where it is as it was, or nearly. 3. Beyond what teaches something a wide link stays idle."""
    current, filled = EVEN, []
    for mbit in (20.0, 20.0, 21.0, 5.0, 18.0, 2000.0, 2000.0):
        plan = next_plan(run(mbit, current))
        if plan is not None:
            current = plan
            asked = ExchangeDensityInput.model_validate_json(plan.input, strict=False)
            assert PLANNERS["exchange-density"].run_json(plan.input) == plan.output
            assert LocalStepsPlan(**plan.strategy_params).density == plan.strategy_params["density"]
            filled.append((mbit, asked.link_s(plan.strategy_params["density"]) / asked.step_s))
    assert [mbit for mbit, _ in filled] == [20.0, 5.0, 18.0, 2000.0]
    assert all(FILLED[0] <= share <= FILLED[1] for _, share in filled[:3])
    assert current.strategy_params["density"] == 0.2
    assert current.reason.startswith("bandwidth 18 → 480 Mbit/s: density ")
    assert current.reason.endswith("→ 20.00 %, more teaches nothing")
    thin = next_plan(run(20))
    assert thin is not None
    assert thin.reason.startswith("bandwidth 20 Mbit/s: density 20.00 → ")
    assert thin.reason.endswith(
        "as much as the thinnest uplink carries in 70 % of a step; learning takes about 1.6 times the steps"
    )


def test_it_falls_at_once_and_rises_when_the_plan_before_has_stood_for_a_while() -> None:
    """A link that seems to carry three times as much for a few seconds changes nothing."""
    thin = next_plan(run(5))
    assert thin is not None
    assert next_plan(run(15, thin, planned_s=100.0 - RISES_AFTER_S + 1)) is None
    assert next_plan(run(15, thin, planned_s=100.0 - RISES_AFTER_S)) is not None
    assert next_plan(run(1, thin, planned_s=95.0)) is not None


def test_what_the_devices_bear_holds_it_on_a_wide_link() -> None:
    plan = next_plan(run(480, of_strategy=ExchangeEstimate(cost=COST, drift=None)))
    assert plan is not None
    assert plan.strategy_params["density"] == pytest.approx(0.1 * 0.172 / 0.5, rel=1e-4)
    why = "more would take the devices over a tenth of a step; learning takes about 1.4 times the steps"
    assert plan.reason.endswith(why)


def test_devices_bear_what_keeps_drift_within_its_bound() -> None:
    """1. Devices would bear a density of 3.4 %. 2. At 20 % ten steps' worth of updates wait; at 3.4 % it would be more
    than 16. 3. So 12.5 % are sent, and the reason says why."""
    drifted = ExchangeEstimate(cost=COST, drift=DriftEstimate(drift=10, density=0.2))
    plan = next_plan(run(480, of_strategy=drifted))
    assert plan is not None
    assert plan.strategy_params["density"] == pytest.approx(0.2 * 10 / 16)
    assert plan.reason.endswith("less would leave more than 16 steps of updates unsent; drift 10 → 16 steps")
    assert PLANNERS["exchange-density"].run_json(plan.input) == plan.output


def test_a_link_that_carries_too_little_against_drift_is_told_of() -> None:
    drifted = ExchangeEstimate(cost=None, drift=DriftEstimate(drift=10, density=0.2))
    plan = next_plan(run(2, of_strategy=drifted))
    assert plan is not None
    assert plan.strategy_params["density"] < 0.2 * 10 / 16
    assert "as much as the thinnest uplink carries in 70 % of a step; drift 10 → " in plan.reason
    assert " steps, islands learn late of each other; learning takes about " in plan.reason


@pytest.mark.parametrize(
    ("drift", "exchange_s", "bandwidth", "density", "held_by"),
    [
        (None, 0.0, 1e9, 0.4, "learning"),  # nothing costs anything
        (4, 0.0, 1e9, 0.4, "learning"),  # there is little to gain, and it costs nothing
        (4, 2.0, 1e9, 0.05, "devices"),  # 2.5 % would keep it within the bound: sent is what devices bear
        (400, 2.0, 1e9, 0.4, "drift"),  # all of it would be too little; more than enough teaches nothing
        (32, 2.0, 1e9, 0.2, "drift"),
        (32, 2.0, 2e4, 0.0198, "links"),
        (32, 0.0, 2e4, 0.0198, "links"),
        (32, 2.0, 10, 0.0001, "links"),
    ],
)
def test_the_cheapest_density_that_keeps_drift_within_its_bound(
    drift: float | None, exchange_s: float, bandwidth: float, density: float, held_by: str
) -> None:
    asked = ExchangeDensityInput(
        entries=10**6, bandwidths=(bandwidth,) * 4, step_s=1.0, value_bytes=0.25, enough=0.4, exchange_s=exchange_s,
        drift=None if drift is None else Drift(steps=drift, density=0.1),
    )  # fmt: skip
    plan = plan_exchange_density(asked)
    assert (plan.density, plan.held_by) == (pytest.approx(density, rel=0.03), held_by)
    if drift is not None and held_by == "drift" and density < asked.enough:
        assert asked.drift_at(plan.density) == pytest.approx(asked.most_drift)


@pytest.mark.parametrize(
    "quiet",
    [
        run(20, policy=replace(FOLLOWING, adapts=())),
        run(20, policy=replace(FOLLOWING, pins=JobPins(strategy_params={"density": 0.3}))),
        replace(run(20), islands=("paris",) * 3),
        given(ranks(*LIKE), policy=FOLLOWING, islands=ISLANDS),  # nothing is known of the links
    ],
)
def test_the_density_stays(quiet: Given) -> None:
    assert next_plan(quiet) is None


def test_others_updates_may_be_as_late_as_an_exchange_is_long() -> None:
    """1. Over a round trip an exchange takes 4.6 steps, of which the link needs little: updates may come 5 late, and
    the reason says why. 2. It stays while that is so. 3. A shorter round trip takes it back. 4. On a link that is full
    the queue says nothing of the way."""
    step_s = 0.172
    plan = next_plan(run(480, policy=ALL, of_strategy=seen(round_s=4.6 * step_s)))
    assert plan is not None
    assert plan.strategy_params == {"density": 0.2, "every": 1, "staleness": 5}
    assert plan.reason == (
        "bandwidth 480 Mbit/s: others' updates up to 1 → 5 steps late, for an exchange takes 4.6; learning takes about "
        "1.2 times the steps"
    )
    assert PLANNERS["exchange-density"].run_json(plan.input) == plan.output
    for late in (4.2, 5.03):
        assert next_plan(run(480, plan, ALL, of_strategy=seen(round_s=late * step_s))) is None
    sooner = next_plan(run(480, plan, ALL, of_strategy=seen(round_s=1.9 * step_s)))
    assert sooner is not None
    assert sooner.strategy_params["staleness"] == 2
    full = next_plan(run(5, plan, ALL, of_strategy=seen(round_s=9 * step_s)))
    assert full is not None
    assert (full.strategy_params["staleness"], full.strategy_params["density"] < 0.01) == (5, True)


def test_turns_come_where_a_look_at_the_model_costs_too_much_and_go_with_a_wide_link() -> None:
    """1. A look takes 9 % of a step, and the link carries 2 %: an eighth of the model in each step, 16 % of it; fewer
    turns would cost more, and more of what is due taught less. 2. A wide link carries 20 % of all in each step."""
    plan = next_plan(run(20, policy=ALL, of_strategy=seen(scan_s=0.09 * 0.172)))
    assert plan is not None
    density, every = plan.strategy_params["density"], plan.strategy_params["every"]
    assert (every, density <= 0.2) == (4, True)
    thinner = next_plan(run(20, policy=FOLLOWING))
    assert thinner is not None
    assert density == pytest.approx(4 * thinner.strategy_params["density"], rel=1e-4)
    assert "; each entry every 1 → 4 steps, for a look at all of the model takes 9 % of a step" in plan.reason
    wide = next_plan(run(480, plan, ALL, of_strategy=seen(scan_s=0.09 * 0.172)))
    assert wide is not None
    assert wide.strategy_params == {"density": 0.2, "every": 1, "staleness": 1}


def test_with_a_density_that_the_job_sets_the_rest_follows() -> None:
    policy = replace(ALL, adapts=("every", "staleness"), half=LocalStepsController(LocalSteps(density=0.04)))
    plan = next_plan(run(480, policy=policy, of_strategy=seen(round_s=0.4, scan_s=0.2 * 0.172)))
    assert plan is not None
    assert plan.strategy_params == {"every": 4, "staleness": 3}


@pytest.mark.parametrize("islands", [2, 4, 40])
def test_bytes_are_those_that_were_counted_and_do_not_grow_with_the_islands(islands: int) -> None:
    """Four real islands sent 0.146 bytes a parameter and step at a density of 0.2, headers and all
    (docs/performance.md)."""
    asked = ExchangeDensityInput(
        entries=10**6, bandwidths=(1e6,) * islands, step_s=1.0, value_bytes=0.2578125, enough=0.2
    )
    plan = plan_exchange_density(asked)
    assert (plan.density, plan.held_by) == (0.2, "learning")
    assert plan.link_s == pytest.approx(0.146 * (islands - 1) / islands / 0.75, rel=0.02)


FOR_ALL = replace(FOLLOWING, adapts=LocalStepsPlan.FOLLOWS)


def test_where_islands_own_weights_are_good_for_their_own_data_alone_gradients_are_taken_at_the_shared_params() -> None:
    """1. The shared model has three times the loss on islands' own data: the plan says so, and what may be sooner. 2.
    From then on nothing is measured, and it stays so."""
    plan = next_plan(run(480, policy=FOR_ALL, of_strategy=seen(advantage=1.1)))
    assert plan is not None
    assert plan.strategy_params["gradients"] == "shared_params"
    assert plan.strategy_params["density"] == 0.2
    assert plan.reason == (
        "bandwidth 480 Mbit/s: gradients at the shared parameters, for on their own data islands' own weights have a "
        "loss 3 times smaller: what each learns there the others take back. One island with all the data may be sooner"
    )
    assert PLANNERS["exchange-density"].run_json(plan.input) == plan.output
    for later in (None, 0.0, 5.0):
        measured = ExchangeEstimate(cost=None, drift=None, advantage=later)
        assert next_plan(run(480, plan, FOR_ALL, of_strategy=measured)) is None


@pytest.mark.parametrize("advantage", [None, 0.0, 0.99])
def test_what_islands_have_in_common_leaves_gradients_at_own_weights(advantage: float | None) -> None:
    measured = ExchangeEstimate(cost=None, drift=None, advantage=advantage)
    assert next_plan(run(480, policy=FOR_ALL, of_strategy=measured)) is None


def test_gradients_that_a_user_has_pinned_stay() -> None:
    policy = replace(FOR_ALL, pins=JobPins(strategy_params={"gradients": "own"}))
    assert next_plan(run(480, policy=policy, of_strategy=seen(advantage=50.0))) is None
