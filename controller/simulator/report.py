"""Outcomes of scenarios of devices: what a policy came to, as rows of a table and as a document.

A document holds nothing that varies between runs of the same scenario and seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from atoll.controller.simulator.steps import Params
from atoll.controller.state.records import PlanRecord

MAX_CURVE_POINTS: Final = 300
"""Points of a curve in a document; longer ones are thinned evenly."""
NEAR_OPTIMUM: Final = 0.02
"""Relative distance of a step from the best split's up to which it counts as found."""
MIN_MEASURED_STEPS: Final = 5
"""Steps that a plan must have lasted for its prediction to be judged."""


def numbers(params: Params) -> dict[str, float]:
    """Return the parameters that are numbers."""
    return {name: value for name, value in params.items() if isinstance(value, int | float)}


@dataclass(slots=True, kw_only=True)
class PlanLog:
    """A plan and its steps. at_s: when it was decided; from_step: the first step that has it. exact_s: its step without
    noise when it came into force; optimum_s: that of the best split of the same total, 0 where it is not known.
    seconds: of each of its steps."""

    record: PlanRecord
    batches: tuple[int, ...]
    at_s: float
    from_step: int
    exact_s: float = 0.0
    optimum_s: float = 0.0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Point:
    """State after a step. progress: in samples of the initial batch."""

    now_s: float
    progress: float
    step_s: float
    total_batch: int
    params: Params


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to a device that offered itself: the first one, and its admission."""

    at_s: float
    device: str
    admitted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """ended: the reason. samples: trained; progress: what they were worth."""

    policy: str
    ended: str
    seconds: float
    steps: int
    progress: float
    samples: int
    plans: tuple[PlanLog, ...]
    points: tuple[Point, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def reached(self) -> bool:
        return self.ended == "target reached"

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(point.step_s for point in self.points)

    @property
    def errors(self) -> list[float]:
        """Relative differences of predicted and measured step times, one for each plan that lasted."""
        return [
            abs(plan.record.predicted_s / statistics.median(plan.seconds) - 1)
            for plan in self.plans
            if plan.record.predicted_s and len(plan.seconds) >= MIN_MEASURED_STEPS
        ]

    @property
    def best_split(self) -> PlanLog | None:
        """The first plan whose step, without noise, is within NEAR_OPTIMUM of the best split's."""
        for plan in self.plans:
            if plan.seconds and plan.optimum_s and plan.exact_s <= (1 + NEAR_OPTIMUM) * plan.optimum_s:
                return plan
        return None


_NUMBERS: Final = ("SECONDS", "STEPS", "STEP", "SAMPLES/S", "PLANS", "BEST SPLIT", "ERROR", "AGAINST FIRST")
COLUMNS: Final = ("POLICY", *(f">{name}" for name in _NUMBERS))


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the table's rows; docs/simulator.md says what the columns mean."""
    first, found = outcomes[0], []
    for one in outcomes:
        wrong, best = one.errors, one.best_split
        found.append(
            [
                one.policy,
                f"{one.seconds:.1f}" if one.reached else f"{one.seconds:.1f}: {one.ended}",
                str(one.steps),
                f"{1000 * one.mean_step_s:.1f} ms",
                f"{one.samples / one.seconds:.1f}",
                str(len(one.plans)),
                f"plan {best.record.id}, {best.at_s:.1f} s" if best else "-",
                f"{100 * statistics.median(wrong):.1f}, {100 * max(wrong):.1f} %" if wrong else "-",
                f"{100 * (one.seconds / first.seconds - 1):+.1f} %" if one.reached and first.reached else "-",
            ]
        )
    return found


def plain(one: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON data, its curve thinned."""
    wrong, best = one.errors, one.best_split
    prediction = {
        "plans": len(wrong),
        "median_error": statistics.median(wrong or [0]),
        "largest_error": max(wrong or [0]),
    }
    stride = -(-len(one.points) // MAX_CURVE_POINTS)
    return {
        "policy": one.policy,
        "ended": one.ended,
        "seconds": one.seconds,
        "steps": one.steps,
        "samples": one.samples,
        "progress": one.progress,
        "mean_step_s": one.mean_step_s,
        "prediction": prediction if wrong else None,
        "best_split": {"run": best.record.run, "plan": best.record.id, "at_s": best.at_s} if best else None,
        "plans": [_plan(plan) for plan in one.plans],
        "verdicts": [asdict(verdict) for verdict in one.verdicts],
        "curve": [asdict(point) for point in one.points[::-stride][::-1]],  # the last one stays
    }


def _plan(plan: PlanLog) -> dict[str, Any]:
    record = plan.record
    return {
        "run": record.run,
        "plan": record.id,
        "at_s": plan.at_s,
        "from_step": plan.from_step,
        "planner": record.planner,
        "reason": record.reason,
        "batches": list(plan.batches),
        "params": dict(record.strategy_params),
        "learning_rate_factor": record.learning_rate_factor or 1.0,
        "predicted_s": record.predicted_s or None,
        "measured_s": statistics.median(plan.seconds) if plan.seconds else None,
        "steps": len(plan.seconds),
        "exact_s": plan.exact_s or None,
        "optimum_s": plan.optimum_s or None,
    }
