"""Outcomes for people and for programs: rows of a table, and a document without anything that varies between runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from atoll.controller.simulator.outcome import Outcome, PlanLog

MAX_POINTS: Final = 300
"""Of a curve, thinned evenly."""
NEAR_OPTIMUM: Final = 0.02
MEASURED_STEPS: Final = 5
"""A plan's prediction is judged where it held for this many steps at least."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative differences of predicted and measured step times, over `plans` plans."""

    plans: int
    median: float
    largest: float


def errors(outcome: Outcome) -> Errors | None:
    found = [
        abs(plan.choice.predicted_s / statistics.median(plan.seconds) - 1)
        for plan in outcome.plans
        if plan.choice.predicted_s and len(plan.seconds) >= MEASURED_STEPS
    ]
    return Errors(len(found), statistics.median(found), max(found)) if found else None


def optimum_at(outcome: Outcome) -> PlanLog | None:
    """The first plan whose step, without noise, is within NEAR_OPTIMUM of the best split's."""
    for plan in outcome.plans:
        if plan.seconds and plan.optimum_s and plan.exact_s <= (1 + NEAR_OPTIMUM) * plan.optimum_s:
            return plan
    return None


COLUMNS: Final = ("POLICY", "SECONDS", "STEPS", "STEP", "SAMPLES/S", "PLANS", "BEST SPLIT", "ERROR", "AGAINST FIRST")
NUMBERS: Final = COLUMNS[1:]


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """AGAINST FIRST: time to the target against that of the first policy. BEST SPLIT: from which plan on. ERROR:
    median and largest of predicted against measured."""
    return [_row(outcome, outcomes[0]) for outcome in outcomes]


def _row(outcome: Outcome, first: Outcome) -> list[str]:
    wrong, best = errors(outcome), optimum_at(outcome)
    both = outcome.reached and first.reached
    return [
        outcome.policy,
        f"{outcome.seconds:.1f}" if outcome.reached else f"{outcome.seconds:.1f}: {outcome.ended}",
        str(outcome.steps),
        f"{1000 * mean_step_s(outcome):.1f} ms",
        f"{outcome.samples / outcome.seconds:.1f}",
        str(len(outcome.plans)),
        f"plan {best.plan}, {best.at_s:.1f} s" if best else "-",
        f"{100 * wrong.median:.1f}, {100 * wrong.largest:.1f} %" if wrong else "-",
        f"{100 * (outcome.seconds / first.seconds - 1):+.1f} %" if both else "-",
    ]


def mean_step_s(outcome: Outcome) -> float:
    return statistics.fmean(point.step_s for point in outcome.points)


def document(scenario: str, seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Plain data: the same for the same scenario and seed, to the byte."""
    return {"scenario": scenario, "seed": seed, "policies": [_plain(outcome) for outcome in outcomes]}


def _plain(outcome: Outcome) -> dict[str, Any]:
    wrong, best = errors(outcome), optimum_at(outcome)
    stride = -(-len(outcome.points) // MAX_POINTS)
    thinned = outcome.points[::-stride][::-1]  # the last one stays
    return {
        "policy": outcome.policy,
        "ended": outcome.ended,
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "samples": outcome.samples,
        "progress": outcome.progress,
        "mean_step_s": mean_step_s(outcome),
        "prediction": None
        if wrong is None
        else {"plans": wrong.plans, "median_error": wrong.median, "largest_error": wrong.largest},
        "best_split": None if best is None else {"run": best.run, "plan": best.plan, "at_s": best.at_s},
        "plans": [_plan(plan) for plan in outcome.plans],
        "verdicts": [asdict(verdict) for verdict in outcome.verdicts],
        "curve": [asdict(point) for point in thinned],
    }


def _plan(plan: PlanLog) -> dict[str, Any]:
    choice = plan.choice
    return {
        "run": plan.run,
        "plan": plan.plan,
        "at_s": plan.at_s,
        "from_step": plan.from_step,
        "planner": choice.planner,
        "reason": choice.reason,
        "batches": list(choice.batches),
        "params": dict(choice.params),
        "learning_rate_factor": choice.learning_rate_factor,
        "predicted_s": choice.predicted_s or None,
        "measured_s": statistics.median(plan.seconds) if plan.seconds else None,
        "steps": len(plan.seconds),
        "exact_s": plan.exact_s or None,
        "optimum_s": plan.optimum_s or None,
    }
