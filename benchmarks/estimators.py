"""Estimators of a run with 1,000 ranks: what a step costs to take in, what a profile costs, how well both predict.

    python benchmarks/estimators.py [--ranks 1000] [--repeats 7]

Telemetry as workers send it: each rank once a second, five steps a batch, all parts measured, gradients sampled every
tenth step. Then, on one rank: the error of the step time predicted for batches never seen, by the noise of the
measurements; and how many steps it takes to follow a second load that begins at once.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time

import numpy as np
from lab.machine import processor

from atoll.controller.estimators.bandwidth import ObservedLink
from atoll.controller.estimators.run import RunEstimators
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.step_model import StepModel

Q, S, K, M = 2e-3, 20e-3, 4e-3, 10e-3
TRAINED_BATCHES = (32, 48, 64)
STEPS_A_BATCH = 20


def telemetry(rng: np.random.Generator, ranks: int, first: int, plan: int, batch: int) -> list[list[ObservedStep]]:
    """Of each rank five steps from `first` on. Every third rank has the batch, the next one more, the next two."""
    total_batch = sum(batch + rank % 3 for rank in range(ranks))
    found = []
    for rank in range(ranks):
        local = batch + rank % 3
        steps = []
        for step, noise in enumerate(rng.lognormal(0, 0.04, 5).tolist(), first):
            a, p = noise * (Q * local + S), noise * (K * local + M)
            norm = 1.0 if step % 10 == 0 else 0.0
            steps.append(
                ObservedStep(
                    step=step, plan=plan, local_batch=local, total_batch=total_batch, step_s=0.5, compute_s=a + p,
                    load_s=0.1 * a, forward_s=0.6 * a, backward_s=p, first_bucket_s=0.2 * p, update_s=0.3 * a,
                    sync_s=0.03, last_sync_s=0.01, local_grad_sqnorm=2 * norm, global_grad_sqnorm=norm,
                )
            )  # fmt: skip
        found.append(steps)
    return found


def shown(values: list[float], scale: float, unit: str) -> str:
    values = [value * scale for value in values]
    return f"{statistics.median(values):7.2f} {unit} [{min(values):.2f}-{max(values):.2f}]"


def cost(ranks: int, repeats: int) -> None:
    rng = np.random.default_rng(1)
    run = RunEstimators()
    island_of = {rank: f"island-{rank // 10}" for rank in range(ranks)}
    step_s, profile_s, links_s = [], [], []
    for second in range(3 * repeats):
        batch = 32 + 8 * (second // 3 % 4)
        told = telemetry(rng, ranks, 5 * second, 1 + second // 3, batch)
        links = [
            [ObservedLink(peer=(rank + 10) % ranks, sent_bytes=second * 10**6, busy_s=0.4 * second)]
            for rank in range(ranks)
        ]
        began_s = time.perf_counter()
        for rank, steps in enumerate(told):
            for seen in steps:
                run.observe(rank, seen)
        heard_s = time.perf_counter()
        for rank, link in enumerate(links):
            run.observe_links(rank, island_of, link, float(second))
        linked_s = time.perf_counter()
        run.profile()
        done_s = time.perf_counter()
        if second % 3 == 2:
            step_s.append((heard_s - began_s) / (5 * ranks))
            links_s.append((linked_s - heard_s) / ranks)
            profile_s.append(done_s - linked_s)
    print(f"a step of one rank                 {shown(step_s, 1e6, 'us')}  goal 20 us")
    print(f"a report of one rank's links       {shown(links_s, 1e6, 'us')}")
    print(f"{f'profile of {ranks} ranks':<34} {shown(profile_s, 1e3, 'ms')}  goal 30 ms")


def prediction(noise: float, trials: int) -> None:
    rng = np.random.default_rng(2)
    errors: list[float] = []
    said: list[float] = []
    for _ in range(trials):
        q, s, k, m = rng.uniform(0.3, 1.7, 4) * (Q, S, K, M)
        model = StepModel()
        step = 0
        for batch in TRAINED_BATCHES:
            for factor in rng.lognormal(0, noise, STEPS_A_BATCH).tolist():
                step += 1
                slow = 3.0 if rng.random() < 0.05 else 1.0
                model.observe(step, batch, slow * factor * (q * batch + s), slow * factor * (k * batch + m))
        estimate = model.estimate()
        assert estimate is not None
        errors += [abs(estimate.compute_s(batch) / ((q + k) * batch + s + m) - 1) for batch in (24, 40, 56, 80)]
        said.append(estimate.error)
    high, highest = np.quantile(errors, [0.95, 1.0])
    print(
        f"noise {noise:.0%}: predicted step off by {statistics.median(errors):.1%}, 95 % of them within {high:.1%}, "
        f"all within {highest:.1%}; said {statistics.median(said):.1%}"
    )


def following(noise: float, slower: float, trials: int) -> None:
    rng = np.random.default_rng(3)
    here, elsewhere = [], []
    for _ in range(trials):
        model = StepModel()
        for step in range(80):
            batch = 64 if step < 40 else 48
            factor = rng.lognormal(0, noise)
            model.observe(step, batch, factor * (Q * batch + S), factor * (K * batch + M))
        counts = {48: 0, 64: 0}
        for step in range(80, 120):
            factor = slower * rng.lognormal(0, noise)
            model.observe(step, 48, factor * (Q * 48 + S), factor * (K * 48 + M))
            estimate = model.estimate()
            assert estimate is not None
            for batch in counts:
                if abs(estimate.compute_s(batch) / (slower * ((Q + K) * batch + S + M)) - 1) > 0.07:
                    counts[batch] = step - 79
        here.append(counts[48])
        elsewhere.append(counts[64])
    print(
        f"slower by {slower - 1:.0%} at noise {noise:.0%}: within 7 % after {np.quantile(here, 0.95):.0f} steps at the "
        f"batch seen, {np.quantile(elsewhere, 0.95):.0f} at the other (95 % of {trials} trials)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trials", type=int, default=200)
    given = parser.parse_args()
    print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, {given.ranks} ranks")
    cost(given.ranks, given.repeats)
    for noise in (0.03, 0.05):
        prediction(noise, given.trials)
    for slower in (1.15, 1.5, 3.0):
        following(0.04, slower, given.trials)


if __name__ == "__main__":
    main()
