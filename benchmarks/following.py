"""Measures how soon the split follows a device that becomes slower, and how often noise alone changes it.

    python benchmarks/following.py [--runs 40] [--steps 10000]

Estimators and decisions as they are in the controller, fed with steps of three simulated devices of speed 1 : 0.6 : 0.3
that train 256 samples a step (4 ms and 0.4 ms a sample over speed). A decision is asked for after every step: so many
steps of telemetry a plan needs. How long these are on their way is benchmarks/loop.py's to show.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.deciding.given import Given, Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.planners.batches.splits import EvenInput, split_evenly
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.observed import ObservedStep

SPEEDS = (1.0, 0.6, 0.3)
TOTAL = 256
FIXED_S, SAMPLE_S, REST_S = 0.004, 0.0004, 0.002
SETTLED = 200  # steps, and by then the best split is found
PATIENCE = 200
REPORTED = 5  # steps between two decisions where false plans are counted: a second's worth or so of telemetry


class Run:
    """A run under the controller's decisions. noise: standard deviation of the logarithm of a step's time."""

    def __init__(self, seed: int, noise: float, outliers: float = 0.0) -> None:
        self.speeds = list(SPEEDS)
        self._random, self._noise, self._outliers = random.Random(seed), noise, outliers
        self._estimators = RunEstimators()
        places = [Place(f"device-{i}", 0, 1.0) for i in range(len(SPEEDS))]
        self.plans: list[PlanRecord] = [first_plan(1, "auto", places, {}, TOTAL)]
        self.step, self._now_s, self._planned_s = 0, 0.0, 0.0

    def train(self, steps: int, every: int = 1, until_planned: bool = False) -> int:
        """So many steps, or fewer where a plan ends it; a plan is asked for after each `every`. Returns how many."""
        for done in range(1, steps + 1):
            self._train_one()
            if self.step % every == 0 and self._plan() and until_planned:
                return done
        return steps

    def _train_one(self) -> None:
        plan = next(plan for plan in reversed(self.plans) if plan.from_step <= self.step)
        batches = _batches(plan.shares)
        times = [
            alone_s * self._random.lognormvariate(0, self._noise) * (3 if self._random.random() < self._outliers else 1)
            for alone_s in self._alone(batches)
        ]
        whole_s = max(times) + REST_S
        self._now_s += whole_s
        for rank, (batch, compute_s) in enumerate(zip(batches, times, strict=True)):
            seen = ObservedStep(
                step=self.step,
                plan=plan.id,
                local_batch=batch,
                total_batch=TOTAL,
                step_s=whole_s,
                compute_s=compute_s,
                forward_s=compute_s / 3,
                backward_s=2 * compute_s / 3,
                first_bucket_s=compute_s / 3,
                last_sync_s=REST_S / 2,
            )
            self._estimators.observe(rank, seen)
        self.step += 1

    def step_s(self, shares: Sequence[float]) -> float:
        """Without noise, and without what comes after the slowest rank."""
        return max(self._alone(_batches(shares)))

    def _alone(self, batches: Sequence[int]) -> list[float]:
        return [(FIXED_S + SAMPLE_S * batch) / speed for batch, speed in zip(batches, self.speeds, strict=True)]

    def _plan(self) -> bool:
        given = Given(
            now_s=self._now_s,
            planned_s=self._planned_s,
            current=self.plans[-1],
            profile=self._estimators.profile(),
            policy=Policy(),
            islands=("here",) * len(SPEEDS),
        )
        plan = next_plan(given)
        if plan is None:
            return False
        self.plans.append(plan)
        self._planned_s = self._now_s
        return True


def _batches(shares: Sequence[float]) -> list[int]:
    """Whole samples: the planner's own where it gave them."""
    if math.isclose(sum(shares), TOTAL):
        return [round(share) for share in shares]
    return list(split_evenly(EvenInput(total_batch=TOTAL, nodes=len(shares))).batches)


def steps_to_follow(seed: int, noise: float, slower: float) -> int:
    """Steps of telemetry from the fastest device's change to the plan that follows; PATIENCE where none does."""
    run = Run(seed, noise)
    run.train(SETTLED)
    run.speeds[0] /= slower
    return run.train(PATIENCE, until_planned=True)


def false_plans(noise: float, outliers: float, steps: int) -> int:
    """Plans of a settled run of which nothing changes, over four runs."""
    found = 0
    for seed in range(4):
        run = Run(seed, noise, outliers)
        run.train(SETTLED, REPORTED)
        before = len(run.plans)
        run.train(steps // 4, REPORTED)
        found += len(run.plans) - before
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    print(
        f"| noise of a step | slower by 30 %: steps, median (90 % within) | by 100 % | false plans in {options.steps} |"
    )
    print("|---|---|---|---|")
    for noise, outliers in ((0.03, 0.0), (0.05, 0.0), (0.1, 0.0), (0.05, 0.05)):
        row = []
        for slower in (1.3, 2.0):
            steps = sorted(steps_to_follow(seed, noise, slower) for seed in range(options.runs))
            late = steps[math.ceil(0.9 * len(steps)) - 1]
            row.append(f"{statistics.median(steps):g} ({late if late < PATIENCE else '–'})" if not outliers else "")
        what = f"{100 * noise:.0f} %" + (f", one in {1 / outliers:.0f} three times as long" if outliers else "")
        print(f"| {what} | {row[0]} | {row[1]} | {false_plans(noise, outliers, options.steps)} |", flush=True)


if __name__ == "__main__":
    main()
