"""Jobs with strategy "auto" on real processes over shaped links: what they choose, how soon, and what a change costs.

    sudo env PATH=$PATH python benchmarks/auto_links.py [--cases 10000,100,10,falling] [--measured-islands]

Two islands in network namespaces, a worker each, train a model of half a million parameters with a pretended step of
0.3 s. The links are limited by token buckets at both ends. The right choice is `dense` at 10 Gbit/s and at 1 Gbit/s,
where whole gradients take 5 % of a step, and another strategy below. A falling link begins with 1 Gbit/s and falls to
20 Mbit/s once the job trains. When it rises again, `dense` gains too little to be chosen back.

Goals: right within 30 s, a change pauses training for 2 s at most, and every step is trained once by all ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS / "runtime"), str(TESTS)]

from behind_nat import why_not
from cluster import Cluster
from shaped_islands import ShapedIslands

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

DEADLINE_S: Final = 90.0
DENSE: Final = "dense"
FALLS_TO: Final = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """took_s: from the first step, or the link's change, until the job trains by `strategy`. pauses_s: of all changes.
    lost: steps that a rank did not train, or trained twice."""

    case: str
    strategy: str
    took_s: float
    pauses_s: tuple[float, ...]
    lost: int
    reason: str


def strategy_of(job: pb.Job) -> str:
    return job.strategy or job.spec.strategy


def chosen_s(cluster: Cluster, job: str, is_right: Callable[[str], bool], since_s: float) -> tuple[str, float]:
    """Return the strategy once it is right and the controller has compared it, and the seconds since then."""
    seen = cluster.wait_for(
        job, "the right strategy", lambda now: is_right(strategy_of(now)) and now.progress.step > 3, DEADLINE_S
    )
    return strategy_of(seen), time.monotonic() - since_s


def settled(cluster: Cluster, job: str) -> None:
    """Wait until the planner has compared the strategies once."""
    wanted = "the planner's first choice"
    cluster.wait_for(
        job, wanted, lambda _: any(one.planner == "strategy" for one in decisions(cluster, job)), DEADLINE_S
    )


def decisions(cluster: Cluster, job: str) -> list[pb.DecidedAdmission]:
    return list(cluster.client.plans(job, 0).admissions)


def one(case: str, *, named: bool) -> list[Outcome]:
    """Run a case; a falling link has two outcomes."""
    with tempfile.TemporaryDirectory(prefix="atoll-plan-") as folder, ShapedIslands(2) as islands:
        islands.shape(1000.0 if case == "falling" else float(case))
        with Cluster(Path(folder)) as cluster:
            islands.start(cluster, named=named)
            out = Path(folder) / "out"
            job = cluster.submit("sized.py", "--out", str(out), workers=(2, 2), strategy="auto", checkpoint_every=1000)
            cluster.wait_for_step(job, 1)
            began_s, found = time.monotonic(), []
            fast = case in ("10000", "1000", "falling")
            right = (lambda name: name == DENSE) if fast else (lambda name: name != DENSE)
            settled(cluster, job)
            found.append((case, *chosen_s(cluster, job, right, began_s)))
            if case == "falling":
                islands.shape(FALLS_TO)
                changed_s = time.monotonic()
                found.append(
                    (f"to {FALLS_TO:g} Mbit/s", *chosen_s(cluster, job, lambda name: name != DENSE, changed_s))
                )
            (out / "enough").touch()
            cluster.wait_for_end(job, 300)
            reasons = [decided.reason for decided in decisions(cluster, job)]
            print(cluster.story(job), *reasons, sep="\n", file=sys.stderr)
            lost, pauses = lost_steps(out), changes_s(cluster, job)
    return [
        Outcome(name, strategy, took, pauses, lost, reasons[-1] if reasons else "") for name, strategy, took in found
    ]


def changes_s(cluster: Cluster, job: str) -> tuple[float, ...]:
    changed = common.EVENT_KIND_STRATEGY_CHANGED
    return tuple(event.total_s for event in cluster.client.events(job) if event.kind == changed)


def lost_steps(out: Path) -> int:
    """Count the steps that a rank did not train exactly once."""
    lost = 0
    for path in out.glob("rank-*.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        lost += len(set(range(max(steps) + 1)).symmetric_difference(steps)) + len(steps) - len(set(steps))
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="10000,100,10,falling", help="Mbit/s, or falling")
    parser.add_argument("--measured-islands", action="store_true", help="agents name no island")
    options = parser.parse_args()
    if reason := why_not():
        print(f"auto_links: {reason}", file=sys.stderr)
        return 2
    print(f"{datetime.date.today()}  load {os.getloadavg()[0]:.0f}")
    print("| case | strategy | within s | pauses, s | steps lost |\n|---|---|---|---|---|")
    good = True
    for case in options.cases.split(","):
        for each in one(case, named=not options.measured_islands):
            pauses = ", ".join(f"{pause:.2f}" for pause in each.pauses_s) or "-"
            print(f"| {each.case} | {each.strategy} | {each.took_s:.1f} | {pauses} | {each.lost} |", flush=True)
            good &= each.took_s <= 30 and each.lost == 0 and max(each.pauses_s, default=0) <= 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
