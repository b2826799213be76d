from __future__ import annotations

import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
from lab.volunteer_pipelines import VolunteerOutcome, simulate
from lab.volunteer_scenario import VolunteerScenario

from atoll.controller.simulator.scenario import check
from atoll.errors import BadInput, NoFeasiblePlan

EXAMPLE = Path(__file__).resolve().parents[2] / "benchmarks" / "scenarios" / "volunteers.toml"


def scenario(**changes: Any) -> VolunteerScenario:
    return check(VolunteerScenario, tomllib.loads(EXAMPLE.read_text()) | {"batches": 8} | changes, "here")


def by_policy(given: VolunteerScenario, seed: int = 0) -> dict[str, VolunteerOutcome]:
    return {one.policy: one for one in simulate(given, given.policies, seed)}


def mean_s(outcome: VolunteerOutcome) -> float:
    return statistics.fmean(outcome.batch_s)


def test_one_device_takes_the_time_of_its_computing_whatever_the_rule() -> None:
    one = scenario(sites=[{"name": "one"}], layers=3, layer_cost=0.5, batch=8, micro_batches=4, max_stages=1)
    for outcome in by_policy(one).values():
        assert outcome.batch_s == pytest.approx((8 * 3 * 0.5,))
        assert (outcome.lost, outcome.redone) == (0, 0)


def test_equal_devices_in_one_place_are_as_fast_by_each_rule() -> None:
    """Nothing to be had from volunteers, thin links or losses: the rules are within 2 % of each other."""
    calm = scenario(sites=[{"name": "hpc", "devices": 4}], max_stages=2, parameter_bytes=0)
    times = [mean_s(one) for one in by_policy(calm).values()]
    assert max(times) < 1.02 * min(times)


def test_what_is_redone_is_what_was_not_handed_over() -> None:
    """1. All volunteers are lost in every batch. 2. By the rules of SWARM and DAPPLE all that they did is done again,
    with handing over a fraction of it. 3. No batch is without its end, and all rules lost the same volunteers."""
    found = by_policy(scenario(disconnect=1.0))
    assert found["volunteer"].redone < 0.3 * found["swarm"].redone
    assert found["volunteer"].redone < 0.3 * found["dapple"].redone
    assert found["volunteer"].lost == found["swarm"].lost == found["dapple"].lost == 8 * 8
    assert found["alone"].lost == 0
    assert mean_s(found["volunteer"]) < mean_s(found["swarm"]) < mean_s(found["dapple"])


def test_volunteers_that_stay_bring_what_their_power_is() -> None:
    """8 of 0.645 beside 8 of 1, no losses and links that carry all: 1.645 times as fast, but for a batch's ends."""
    thick = scenario(disconnect=0.0, between={"mbit_s": [16_000, 16_000], "delay_s": [0.001, 0.001]}, layers=120)
    found = by_policy(thick)
    gained = mean_s(found["alone"]) / mean_s(found["volunteer"])
    assert 1.55 < gained < 1.66


def test_the_same_seed_gives_the_same_batches() -> None:
    given = scenario(batches=3)
    assert by_policy(given, seed=4) == by_policy(given, seed=4)
    assert by_policy(given, seed=4) != by_policy(given, seed=5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sites": [{"name": "home", "reliable": False}]}, "none is reliable"),
        ({"disconnect": 1.5}, "disconnect"),
        ({"micro_batches": 1024}, "micro_batches = 1024 is more than batch = 512"),
        ({"between": {"mbit_s": [300, 50]}}, "must be lowest and highest"),
        ({"batches": 100_000}, "micro-batches on devices; at most"),
        ({"sites": [{"name": "hpc", "count": 300, "devices": 2}]}, "sites have 600 devices; at most 512"),
        ({"speling": 1}, "speling"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        scenario(**changes)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises((BadInput, NoFeasiblePlan), match="no policy 'swam' for volunteers. Did you mean 'swarm'"):
        list(simulate(scenario(), ["swam"], 0))
