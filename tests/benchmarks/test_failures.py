from __future__ import annotations

import math
import statistics
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lab import failures
from lab.failure_scenario import FailureScenario, FailuresSection
from lab.failures import DAY_S, Failure

from atoll.controller.simulator.scenario import Section, check, read
from atoll.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
GEMINI: dict[str, Any] = {
    "kind": "failures",
    "machines": 16,
    "step_s": 62,
    "days": 1000,
    "memory": {"write_s": 62, "save_s": 162, "retrieve_s": 3},
    "persistent": {"every_s": 10_800, "pause_s": 81, "write_s": 540, "retrieve_s": 480},
    "recovery": {"detect_s": 15, "restart_s": 243, "replace_s": 300, "standbys": 1},
}
"""Section 6.7 of Gemini."""


def scenario(**changes: Any) -> FailureScenario:
    return check(FailureScenario, GEMINI | changes, "test")


def survived(seed: int = 1, policy: str = "memory", **changes: Any) -> failures.FailureOutcome:
    return next(failures.simulate(scenario(**changes), [policy], seed))


def scripted(monkeypatch: pytest.MonkeyPatch, *events: Failure) -> None:
    monkeypatch.setattr(failures, "failures", lambda *_: iter(events))


def test_failures_come_at_their_rates_and_the_same_for_the_same_seed() -> None:
    rates = FailuresSection(machine_per_day=0.1, hardware=0.25, rack_per_day=0.05, rack_machines=4)
    found = list(failures.failures(rates, 10, 2000 * DAY_S, 7))
    assert found == list(failures.failures(rates, 10, 2000 * DAY_S, 7))
    assert found != list(failures.failures(rates, 10, 2000 * DAY_S, 8))
    assert all(a.at_s < b.at_s for a, b in pairwise(found))
    kinds = [len(failure.machines) for failure in found]
    for expected, seen in (
        (1500, kinds.count(0)),
        (500, kinds.count(1)),
        (200, kinds.count(4)),
        (100, kinds.count(2)),  # the last rack has two machines
    ):
        assert abs(seen - expected) < 5 * math.sqrt(expected)


def test_nothing_fails_at_a_rate_of_zero() -> None:
    assert list(failures.failures(FailuresSection(machine_per_day=0.0, hardware=0.5), 1000, 1e9, 1)) == []
    calm = survived(failures={"machine_per_day": 0}, persistent={"pause_s": 0})
    assert calm.effective == pytest.approx(1, abs=1e-4)
    assert calm.recoveries == ()


def test_without_failures_only_serialising_costs_time_as_the_paper_has_it() -> None:
    """14.5 % of HighFreq's time (section 6.7.3): 81 s for every nine steps is 81 / 639, or 14.5 % of the steps' 558."""
    often = survived(policy="storage-often", failures={"machine_per_day": 0})
    assert 1 / often.effective - 1 == pytest.approx(0.145, abs=0.001)


def test_a_thousand_machines_that_fail_as_the_papers_train_as_long_as_there() -> None:
    """91 % (section 6.7.3). Against HighFreq the paper gains more, 54 %: it charges each of 15 failures a day what one
    costs on its own, though many come while another is being recovered from or before there is more to lose."""
    given = scenario(machines=1000, days=300, failures={"machine_per_day": 0.015})
    memory, often, seldom = failures.simulate(given, given.policies, 1)
    assert memory.effective == pytest.approx(0.91, abs=0.005)
    assert 1.3 < memory.effective / often.effective < 1.54
    assert seldom.effective < 0.3
    assert memory.failures == often.failures == seldom.failures


@pytest.mark.parametrize(("policy", "days"), [("memory", 8_000), ("storage-often", 3_000), ("storage-seldom", 8_000)])
def test_wasted_time_is_that_of_equation_6_1_where_failures_are_rare(policy: str, days: int) -> None:
    found = survived(policy=policy, days=days, failures={"machine_per_day": 0.005})
    wasted = [each.wasted_s for each in found.recoveries]
    error = statistics.stdev(wasted) / math.sqrt(len(wasted))
    assert statistics.fmean(wasted) == pytest.approx(found.expected_wasted_s, abs=5 * error)


def test_a_process_restarts_from_its_own_memory_a_machine_from_its_peers_a_lost_group_from_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 62 s, each in memory a step later; stored every 174 steps."""
    day = (Failure(30_000.0, ()), Failure(40_000.0, (3,)), Failure(50_000.0, (2, 3)), Failure(60_000.0, (1, 2)))
    scripted(monkeypatch, *day)
    found = survived(days=1)
    assert [each.tier for each in found.recoveries] == ["local", "peers", "persistent", "peers"]
    assert [each.retrieve_s for each in found.recoveries] == [0, 3, 480, 3]
    assert all((each.lost_s < 2 * 62 + 81) == (each.tier != "persistent") for each in found.recoveries)


def test_a_group_that_is_lost_in_two_parts_within_one_recovery_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Machine 2 goes. 2. Before it is restored, machine 3 goes, which had the other replica."""
    scripted(monkeypatch, Failure(30_000.0, (2,)), Failure(30_100.0, (3,)))
    (only,) = survived(days=1).recoveries
    assert only.tier == "persistent"
    assert only.pause_s == 300 + 480 + 243  # the standby is used up: that ordered at first has to come
    scripted(monkeypatch, Failure(30_000.0, (2,)), Failure(30_100.0, (4,)))
    assert survived(days=1).recoveries[0].tier == "peers"
    scripted(monkeypatch, Failure(30_000.0, (2,)), Failure(31_000.0, (3,)))
    assert [each.tier for each in survived(days=1).recoveries] == ["peers", "peers"]


def test_standbys_spare_the_wait_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for standbys, waits_s in ((0, 300), (1, 15)):
        scripted(monkeypatch, Failure(30_000.0, (2,)))
        (only,) = survived(days=1, recovery={"detect_s": 15, "restart_s": 243, "standbys": standbys}).recoveries
        assert only.pause_s == waits_s + 162 + 3 + 243


def test_the_placement_that_knows_racks_survives_their_loss() -> None:
    racks = {"machine_per_day": 0.015, "hardware": 1.0, "rack_per_day": 0.05, "rack_machines": 4}
    assert survived(failures=racks).tiers()["persistent"] <= 3
    one_rack = survived(failures=racks | {"rack_machines": 16})
    assert one_rack.tiers()["persistent"] > 30


def test_the_same_seed_gives_the_same_outcomes() -> None:
    given = scenario(days=100, failures={"machine_per_day": 0.1, "hardware": 0.5})
    first, again, other = (list(failures.simulate(given, given.policies, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": 3}, "unknown field 'machine'. Did you mean 'machines'?"),
        ({"memory": {"write": 3}}, "unknown field 'memory.write'. Did you mean 'write_s'?"),
        ({"replicas": 16, "machines": 8}, "replicas = 16 needs as many machines; there are 8"),
        ({"failures": {"rack_per_day": 1}}, "failures has rack_per_day and needs rack_machines too"),
        ({"machines": 10_000, "failures": {"machine_per_day": 1000}}, "failures; at most 1000000"),
        ({"step_s": 0.001, "days": 100_000}, "steps; at most 1e10"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        scenario(**changes)
    assert says in str(refused.value)


def test_the_example_and_what_the_manual_shows_of_it_can_be_simulated() -> None:
    """The manual's file names every field."""
    example = ROOT / "benchmarks" / "scenarios" / "failures.toml"
    manual = (ROOT / "docs" / "simulator.md").read_text().partition("## Failures\n")[2]
    told = tomllib.loads(manual.partition("```toml\n")[2].partition("```")[0])
    for document in (read(example), told):
        given = check(FailureScenario, document | {"days": 1}, "example")
        assert [one.policy for one in failures.simulate(given, given.policies, 1)] == list(failures.POLICIES)
    for name, field in FailureScenario.model_fields.items():
        assert name in told
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            assert set(told[name]) == set(section.model_fields)


def test_a_policy_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="no policy 'memry' for failures. Did you mean 'memory'"):
        survived(policy="memry")
