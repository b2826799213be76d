"""Effective training time through failures, by where checkpoints are kept: simulated, so it depends on no machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

from atoll.cli.render.terminal import aligned
from atoll.controller.simulator.scenario import check
from lab.failure_scenario import FailureScenario
from lab.failures import POLICIES, FailureOutcome, simulate

SEEDS: Final = (1, 2, 3)
GEMINI: Final[dict[str, Any]] = {
    "kind": "failures",
    "machines": 16,
    "days": 1000,
    "step_s": 62,
    "memory": {"write_s": 62, "save_s": 162, "retrieve_s": 3},
    "persistent": {"every_s": 10_800, "pause_s": 81, "write_s": 540, "retrieve_s": 480},
    "recovery": {"detect_s": 15, "restart_s": 243},
}
"""GPT-2 100B on p4d.24xlarge (Gemini, 2023, section 6.7). Writing 540 s: so that there are nine steps between two."""
HERE: Final[dict[str, Any]] = GEMINI | {
    "step_s": 1,
    "memory": {"write_s": 1, "save_s": 0, "retrieve_s": 3},
    "persistent": {"every_s": 10_800, "pause_s": 0, "write_s": 480, "retrieve_s": 480},
    "recovery": {"detect_s": 3, "restart_s": 5, "standbys": 2},
}
"""What Atoll has set itself: detection in 3 s, training again 10 s after a process dies, nothing serialised."""


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}")
    print("\n".join(aligned([columns[0], *(f">{name}" for name in columns[1:])], rows)), flush=True)


def spread(found: Sequence[FailureOutcome], value: Callable[[FailureOutcome], float], form: str) -> str:
    values = sorted(map(value, found))
    return f"{statistics.median(values):{form}} [{values[0]:{form}}-{values[-1]:{form}}]"


def percent(found: Sequence[FailureOutcome]) -> str:
    return spread(found, lambda one: 100 * one.effective, ".1f")


def by_policy(scenario: FailureScenario) -> dict[str, list[FailureOutcome]]:
    found = [list(simulate(scenario, list(POLICIES), seed)) for seed in SEEDS]
    return {policy: [one[i] for one in found] for i, policy in enumerate(POLICIES)}


def charged(scenario: FailureScenario, one: FailureOutcome) -> float:
    """The paper's way: a step's share of what training takes without failures, less for each failure Eq. 6.1 and what
    any recovery costs, as if no failure ever came during another's recovery."""
    calm = next(
        simulate(scenario.model_copy(update={"failures": scenario.failures.model_copy(update=_CALM)}), [one.policy], 0)
    )
    fixed_s = scenario.recovery.detect_s + scenario.recovery.restart_s
    fixed_s += scenario.memory.save_s if one.policy == "memory" else 0
    return 100 * (calm.effective - one.failures / one.seconds * (one.expected_wasted_s + fixed_s))


_CALM: Final = {"machine_per_day": 0.0, "rack_per_day": 0.0}


def frequent() -> None:
    """Figure 6.15a."""
    rows = []
    for a_day in (0, 1, 2, 4, 8):
        found = by_policy(check(FailureScenario, GEMINI | {"failures": {"machine_per_day": a_day / 16}}, "frequent"))
        rows.append([str(a_day), *(percent(found[policy]) for policy in POLICIES)])
    show("16 machines: effective training time, %", ("FAILURES A DAY", *POLICIES), rows)


def many() -> None:
    """Figure 6.15b: the paper has 91 for memory at 1,000 instances, 54 % more than HighFreq."""
    rows = []
    for machines in (16, 200, 400, 600, 800, 1000):
        given = check(
            FailureScenario,
            GEMINI | {"machines": machines, "days": 300, "failures": {"machine_per_day": 0.015}},
            "many",
        )
        found = by_policy(given)
        as_there = [charged(given, found[policy][0]) for policy in POLICIES]
        shown = [f"{value:.1f}" if value > 0 else "none" for value in as_there]
        rows.append([str(machines), *(percent(found[policy]) for policy in POLICIES), *shown])
    columns = ("MACHINES", *POLICIES, *(f"SUM: {policy}" for policy in POLICIES))
    show("1.5 % of the machines fail a day: effective training time, %", columns, rows)


def wasted() -> None:
    """Eq. 6.1 at one failure in ten days, so that nearly none follows on another."""
    rows = []
    for what, changes in (("processes", {}), ("machines", {"hardware": 1.0})):
        given = GEMINI | {"days": 20_000, "failures": {"machine_per_day": 0.1 / 16} | changes}
        for policy, found in by_policy(check(FailureScenario, given, "wasted")).items():
            mean_s = spread(found, lambda one: statistics.fmean(r.wasted_s for r in one.recoveries), ".0f")
            rows.append([f"{what}: {policy}", mean_s, f"{found[0].expected_wasted_s:.0f}"])
    show("Wasted time of a failure, s", ("FAILURES OF", "MEAN", "EQ. 6.1"), rows)


def replicas() -> None:
    """Machines and racks of eight fail, and all their memory with them."""
    rows = []
    for machines in (16, 1000):
        for m in (1, 2, 3):
            rates = {"machine_per_day": 0.015, "hardware": 1.0, "rack_per_day": 0.01, "rack_machines": 8}
            given = check(
                FailureScenario,
                HERE | {"machines": machines, "replicas": m, "days": 300, "failures": rates},
                "replicas",
            )
            found = by_policy(given)
            memory = found["memory"]
            rows.append(
                [
                    f"{machines} machines, {m} replicas",
                    spread(memory, lambda one: 100 * one.effective, ".2f"),
                    spread(memory, lambda one: one.tiers()["peers"], ".0f"),
                    spread(memory, lambda one: one.tiers()["persistent"], ".0f"),
                    *(percent(found[policy]) for policy in list(POLICIES)[1:]),
                ]
            )
    columns = ("", "memory, %", "FROM PEERS", "FROM THE STORE", *list(POLICIES)[1:])
    show("Atoll's own recovery, all failures take machines, racks of eight among them", columns, rows)


def simulated() -> None:
    for table in (frequent, many, wasted, replicas):
        table()
