"""Strategy compressed over thin links: what its planner predicts, and what its groups give, beside simple rules.

    sudo env PATH=$PATH python benchmarks/compressed.py [--models resnet,gpt,words] [--rates 100,500,1000]
        [--algorithms dgc] [--workers 2] [--compute-s 0.18] [--turns 3] [--json compressed.json]

Needs root. Workers are processes in network namespaces of their own (benchmarks/lab), at real-time priority, so
that what else runs on the machine counts little. Passes wait as long as a device would compute
(scripts/paced_models.py); compression, messages and updates are real. Workers train first by the groups that hold
before any plan, and tell what they measured. Planner `tensor-groups` makes groups of it, and anew where those should
take another time by what is told then, as the controller does. Then in turns the same workers train by its groups and
by each rule:

none      nothing is compressed; all-reduced in pieces as strategy `dense` does
all       everything is compressed in the backward pass, in such pieces, everybody's to everybody
all-cpu   everything by the exchange's thread, divisible
by-size   of tensors of 64 KiB and more what `all` does, else what `none` does

Cells: median milliseconds of an iteration, with what the planner's timeline predicts for it (of the groups that it did
not make too). bound: the shortest that it finds where compression takes no time. The first steps of each turn are left
out. Load is the mean of the last minute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "scripts")]

from lab.asked_workers import AskedWorkers
from lab.compression_bound import bound_s
from lab.machine import processor
from lab.network import DEVICE, Network, refuse_without_tools
from paced_models import MODELS, PacedModel

from atoll.controller.planners.tensor_compression.tensor_groups import grouping_time, plan_grouping
from atoll.errors import AtollError, BadInput
from atoll.strategies.compressed.controller import MIN_CHANGE
from atoll.strategies.compressed.costs.compression_costs import CompressionCosts, costs_of
from atoll.strategies.compressed.costs.measured import MeasuredCosts
from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import IN_THE_BACKWARD_PASS, RULES, TensorGroup, named

WORKER: Final = Path(__file__).resolve().parent / "scripts" / "compressed_steps.py"
PORT_FIRST: Final = 29_700
DEADLINE_S: Final = 150.0
WARM_STEPS: Final = 45  # costs are told every 20
MOST_PLANS: Final = 3
LEFT_OUT: Final = 2
LEAST_STEPS: Final = 6
TURN_S: Final = 2.0
PLANNED: Final = "planned"


class Workers(AskedWorkers):
    """The processes of one cell."""

    def __init__(self, network: Network, port: int, asked: dict[str, Any]) -> None:
        super().__init__(network, WORKER, DEADLINE_S)
        self._port, self._asked = port, asked

    def asked(self, rank: int) -> dict[str, Any]:
        return self._asked

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self.network.workers), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.network.address(0), "MASTER_PORT": str(self._port), "GLOO_SOCKET_IFNAME": DEVICE,
            "ATOLL_ISLAND": "",
        }  # fmt: skip

    def train(self, groups: Sequence[TensorGroup] | None, steps: int, *, links: bool = False) -> list[dict[str, Any]]:
        """What each tells of so many steps. links: they measure links first."""
        said = [[group.end - group.begin, group.way.name] for group in groups] if groups is not None else None
        self.ask({"groups": said, "steps": steps, "links": links})
        return self.answers()


@dataclass
class Arm:
    """One way to group, by median seconds of an iteration in each turn."""

    predicted_s: float
    groups: int
    compressed: int
    turns_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.turns_s)


@dataclass
class Cell:
    """One model at one rate. load: mean number of processes that wanted a core."""

    model: str
    algorithm: str
    rate: float
    workers: int
    bound_s: float
    load: float
    arms: dict[str, Arm]
    costs: dict[str, Any]  # what the planner was asked last
    runs: list[str]  # of its groups


def rules(layout: TensorLayout) -> dict[str, list[TensorGroup]]:
    simple = {name: layout.by_size(min_bytes, IN_THE_BACKWARD_PASS) for name, (min_bytes, _) in RULES.items()}
    return simple | {"all-cpu": layout.by_size(0, named("cpu/cpu/divisible"))}


def predicted_s(costs: CompressionCosts, groups: Sequence[TensorGroup]) -> float:
    sizes = [group.end - group.begin for group in groups]
    return grouping_time(costs.given, sizes, [group.way.name for group in groups])


def told_costs(told: Sequence[dict[str, Any]]) -> CompressionCosts:
    """Raises BadInput."""
    costs = costs_of({rank: MeasuredCosts.model_validate(one["told"]) for rank, one in enumerate(told)}, len(told))
    if costs is None:
        raise BadInput("workers told of different groups")
    return costs


def planned_groups(costs: CompressionCosts) -> tuple[list[TensorGroup], float, list[str]]:
    """The planner's groups, its bound, and its runs in short."""
    plan = plan_grouping(costs.given)
    ends = list(accumulate(plan.sizes, initial=0))
    groups = [
        TensorGroup(begin, end, named(option))
        for (begin, end), option in zip(pairwise(ends), plan.options, strict=True)
    ]
    return (
        groups,
        bound_s(costs.given, plan),
        [f"{run.end - run.begin}x {run.option} in {run.groups}" for run in plan.runs],
    )


def measure(workers: Workers, model: str, algorithm: str, rate: float, count: int, turns: int) -> Cell:
    parameters = [(name, one) for name, one in PacedModel(model, 0.0, 0).named_parameters()][::-1]
    layout = TensorLayout.of([name for name, _ in parameters], [one for _, one in parameters])
    ways = rules(layout)
    costs = told_costs(workers.train(ways["by-size"], WARM_STEPS, links=True))
    made, bound, runs = planned_groups(costs)
    for _ in range(MOST_PLANS - 1):  # as the controller plans: backward passes may be longer beside an exchange
        planned_s = predicted_s(costs, made)
        costs = told_costs(workers.train(layout.allowed(made), WARM_STEPS))
        if abs(predicted_s(costs, made) - planned_s) <= MIN_CHANGE * planned_s:
            break
        again, bound, runs_again = planned_groups(costs)
        if predicted_s(costs, again) < predicted_s(costs, made) * (1 - MIN_CHANGE / 2):
            made, runs = again, runs_again
    ways = {PLANNED: layout.allowed(made), **ways}
    arms = {
        name: Arm(predicted_s(costs, groups), len(groups), sum(group.way.compressed for group in groups))
        for name, groups in ways.items()
    }
    for turn in range(turns):
        for name in sorted(arms, key=list(ways).index, reverse=bool(turn % 2)):
            steps = LEFT_OUT + max(LEAST_STEPS, round(TURN_S / arms[name].predicted_s))
            said = workers.train(ways[name], steps)
            arms[name].turns_s.append(max(statistics.median(one["step_s"][LEFT_OUT:]) for one in said))
    return Cell(model, algorithm, rate, count, bound, os.getloadavg()[0], arms, costs.given.model_dump(), runs)


def row(cell: Cell) -> str:
    best_s = min(arm.measured_s for name, arm in cell.arms.items() if name != PLANNED)
    mine = cell.arms[PLANNED]
    cells = [cell.model, cell.algorithm, f"{cell.rate:g}"]
    cells += [f"{1e3 * arm.measured_s:.0f} ({1e3 * arm.predicted_s:.0f})" for arm in cell.arms.values()]
    cells += [f"{mine.predicted_s / mine.measured_s - 1:+.0%}", f"{mine.measured_s / best_s:.2f}"]
    cells += [f"{1e3 * cell.bound_s:.0f}: {mine.measured_s / cell.bound_s:.2f}", f"{cell.load:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Strategy compressed over thin links. Needs root.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rates", default="100,500,1000", help="Mbit/s")
    parser.add_argument("--algorithms", default="dgc")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compute-s", type=float, default=0.18, help="of both passes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    cells: list[Cell] = []
    try:
        refuse_without_tools()
        print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, {options.workers} workers\n")
        heads = ["model", "algorithm", "Mbit/s", PLANNED, *RULES, "all-cpu"]
        heads += ["predicted off by", "of the best rule", "bound: of it", "load"]
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        with Network(options.workers) as network:
            for algorithm in options.algorithms.split(","):
                for model in options.models.split(","):
                    network.shape(None)
                    asked = {"model": model, "settings": {"algorithm": algorithm}, "seconds": options.compute_s}
                    with Workers(network, PORT_FIRST + len(cells), asked) as workers:
                        for rate in map(float, options.rates.split(",")):
                            network.shape(rate)
                            cells.append(measure(workers, model, algorithm, rate, options.workers, options.turns))
                            print(row(cells[-1]), flush=True)
                            if options.json:
                                options.json.write_text(json.dumps([asdict(cell) for cell in cells]) + "\n")
    except AtollError as error:
        print(f"compressed: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
