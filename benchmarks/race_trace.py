"""The race over a link that changes: `local-steps` with the density that its controller plans, against fixed ones.

    python benchmarks/race_trace.py [--size XXS] [--rho 100] [--for-s 300] [--seeds 1,2]
        [--densities 0.2,0.1,0.05,0.025]

The links of all islands follow benchmarks/traces/wan.csv, a sample a second, scaled so that at the trace's mean a dense
float32 ring takes rho steps without network; such a step takes a second. Everybody trains for as long, in virtual time,
with learning rates by the time that is left, and so as many steps as its exchange lets it. Told are these steps, and
the held-out loss of the one model at the end. `controller` plans by planner exchange-density and the rules of the
strategy's controller half, 5 s after the last plan at the earliest and 15 where more is to be sent, of what the
controller's estimator makes of the link's bytes and busy time.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from racing.clock import link_of
from racing.inner import Replica
from racing.task import SIZES, Batches, Task, shards
from racing.updates import OwnedUpdates

from atoll.controller.estimators.bandwidth import BandwidthEstimator, ObservedLink
from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput, plan_exchange_density
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES
from atoll.strategies.local_steps.controller import ENOUGH, RISES_AFTER_S, USED, moves
from atoll.strategies.local_steps.settings import RETURNED

TRACE: Final = Path(__file__).resolve().parent / "traces" / "wan.csv"
ISLANDS: Final = 4
MEASURED_S: Final = 5.0
"""That a plan has stood at least before the next: steps of a second are measured under it first."""
MODELS: Final = 1000
"""The link is told of as if so many models went over as many of it: the estimator takes no word of a few kilobytes."""
WAITED_OF: Final = 8
"""Steps of whose time it is told how much was waited."""
PARTS: Final = 1000  # of the time, by which learning rates go
PEAK: Final = 2e-3


@dataclass(slots=True)
class Link:
    """The trace as a link. bps: at second 0, 1, ..., and again from the first on."""

    bps: Sequence[float]
    free_s: float = 0.0
    carried: float = 0.0  # bytes
    busy_s: float = 0.0
    under_way: deque[tuple[float, float, float]] = field(default_factory=deque)  # begins, ends, bytes

    def carry(self, ready_s: float, count: float) -> float:
        """When `count` bytes that are ready at `ready_s` are there."""
        now = max(self.free_s, ready_s)
        left = count * 8
        while left > 0:
            bps, ends = self.bps[int(now) % len(self.bps)], float(int(now) + 1)
            taken = min(left, bps * (ends - now))
            begun, now, left = now, (ends if taken < left else now + taken / bps), left - taken
            self.under_way.append((begun, now, taken / 8))
        self.free_s = now
        return now

    def told(self, now_s: float) -> ObservedLink:
        """What it carried until now."""
        while self.under_way and self.under_way[0][1] <= now_s:
            begun, ends, count = self.under_way.popleft()
            self.carried, self.busy_s = self.carried + count, self.busy_s + ends - begun
        return ObservedLink(peer=1, sent_bytes=int(MODELS * self.carried), busy_s=self.busy_s)


class Clocked(Replica):
    """Learning rates by the time that has passed, `done` of PARTS."""

    done = 0

    def update(self, gradient_N: torch.Tensor, step: int) -> None:
        super().update(gradient_N, self.done)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="XXS")
    parser.add_argument("--rho", type=float, default=100.0)
    parser.add_argument("--for-s", type=float, default=300.0)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--densities", default="0.2,0.1,0.05,0.025", help="fixed ones, separated by commas")
    return parser


def main() -> int:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    fixed = [float(one) for one in options.densities.split(",")]
    print(f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}")
    print(f"{options.size}, rho {options.rho:g} at the trace's mean, {options.for_s:g} s, seeds {options.seeds}")
    print("| density | steps | held-out |\n|---|---|---|")
    for density in [None, *fixed]:
        ended = [trained(options, int(seed), density) for seed in options.seeds.split(",")]
        steps, loss = (statistics.median(one[at] for one in ended) for at in (0, 1))
        each = ", ".join(f"{one[1]:.3f}" for one in ended)
        print(f"| {'controller' if density is None else density} | {steps:.0f} | {loss:.3f} ({each}) |", flush=True)
    return 0


def trained(options: argparse.Namespace, seed: int, fixed: float | None) -> tuple[int, float]:
    """Steps, and the held-out loss after them. fixed: the density; None: as planned."""
    task = Task(SIZES[options.size], seed)
    torch.manual_seed(seed)
    replicas = [
        Clocked(task, Batches(part, task.size, seed, island), PEAK, PARTS)
        for island, part in enumerate(shards(task.size, "P1", ISLANDS, seed))
    ]
    network = link_of(options.rho, task.entries, ISLANDS, step_s=1.0)
    with TRACE.open() as rows:
        rates = [float(row["mbit_s"]) for row in csv.DictReader(rows)]
    mean = statistics.mean(rates)
    link = Link([rate / mean * network.up_bps for rate in rates])
    density = fixed or ENOUGH
    method = Paced(replicas, density)
    estimator = BandwidthEstimator()
    due_s: dict[int, float] = {}
    waited_s: deque[float] = deque(maxlen=WAITED_OF)
    now_s, planned_s, step = 0.0, 0.0, 0
    while now_s < options.for_s:
        waited_s.append(max(0.0, due_s.pop(step, 0.0) - now_s))
        now_s += waited_s[-1] + 1.0
        for replica in replicas:
            replica.done = min(PARTS - 1, int(now_s / options.for_s * PARTS))
        for one in method.step(step):
            due_s[one.due] = link.carry(now_s, one.up_bytes)
        step += 1
        waited = sum(waited_s) / (sum(waited_s) + len(waited_s))
        estimator.observe(0, {0: "here", 1: "there"}, [link.told(now_s)], now_s, stall_share=waited)
        estimates = estimator.estimates()
        if fixed is None and estimates and now_s - planned_s >= MEASURED_S:
            after = planned(density, estimates["here"].bandwidth_bps / 8, MODELS * task.entries)
            if after < density or (after > density and now_s - planned_s >= RISES_AFTER_S):
                planned_s, density = now_s, after
                method.pace(density)
    return step, task.held_out(method.consolidated())


def planned(density: float, bandwidth: float, entries: int) -> float:
    """The density that the controller goes on with. bandwidth: bytes a second."""
    asked = ExchangeDensityInput(
        entries=entries,
        bandwidths=(bandwidth,) * ISLANDS,
        step_s=1.0,
        value_bytes=VALUE_BYTES["int2"],
        enough=ENOUGH,
        returned=RETURNED,
        used=USED,
    )
    plan = plan_exchange_density(asked)
    return plan.density if moves(asked, density, plan.density, plan.held_by) else density


class Paced(OwnedUpdates):
    """local-steps, two bits, with a density that changes."""

    def __init__(self, replicas: Sequence[Replica], density: float) -> None:
        super().__init__(replicas, density=density, back=min(1.0, RETURNED * density), bits=2)

    def pace(self, density: float) -> None:
        self._density, self._back = density, min(1.0, RETURNED * density)


if __name__ == "__main__":
    sys.exit(main())
