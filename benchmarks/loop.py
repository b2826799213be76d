"""The live loop on workers of unequal speed: even start, plans until the best split, and a second load in mid-run.

    python benchmarks/loop.py [--computing] [--base 0.35] [--watch 12]

A real local cluster (controller, etcd, three agents) trains with 256 samples a step at speeds 1 : 0.6 : 0.3. The
passes of its script wait in place of computing (scripts/paced_train.py), so that the workers are as independent as
devices are; with `--computing` they compute on the cores of this machine, and slow each other down. The split is
pinned even, measured, and left to the controller: its plans are counted until no better one follows. Then the
fastest worker takes twice as long. Steps are rank 0's, from telemetry; what a plan predicted is held against the
median of its own steps.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster
from lab.machine import processor
from paced_train import SLOWER_FROM

from atoll.controller.deciding.given import lead_steps
from atoll.v1 import jobs_pb2 as pb

SPEEDS = (1.0, 0.6, 0.3)
SECONDS = 3600
QUIET_S = 15.0  # no further plan for so long: it has settled


def step_s(cluster: Cluster, job: str, seconds: float) -> float:
    """Median of the steps shown over so long."""
    seen, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends:
        if shown := cluster.job(job).progress.step_s:
            seen.append(shown)
        time.sleep(0.5)
    return statistics.median(seen)


def until_settled(cluster: Cluster, job: str, deadline_s: float = 180) -> pb.Job:
    """Until no plan has come for QUIET_S."""
    ends, newest, since = time.monotonic() + deadline_s, 0, time.monotonic()
    while time.monotonic() < ends:
        now = cluster.job(job)
        if now.plan.id != newest:
            newest, since = now.plan.id, time.monotonic()
        if time.monotonic() - since > QUIET_S:
            return now
        time.sleep(0.5)
    raise SystemExit(f"plans still come after {deadline_s:.0f} s\n{cluster.story(job)}")


def show_plans(cluster: Cluster, job: str, after: int) -> None:
    for decided in cluster.client.plans(job).plans:
        plan, measured_s = decided.plan, decided.measured_step_s
        if plan.id <= after:
            continue
        off = f"{measured_s / plan.predicted_step_s - 1:+.1%}" if plan.predicted_step_s and measured_s else "-"
        shares = "/".join(f"{share:.0f}" for share in plan.shares)
        print(
            f"  plan {plan.id} {plan.planner:12} {shares:12} predicted {plan.predicted_step_s * 1e3:6.1f} ms  "
            f"measured {measured_s * 1e3:6.1f} ms  {off}",
            flush=True,
        )


def slow_down(cluster: Cluster, job: str, out: Path, watch_s: float) -> None:
    """The fastest worker takes twice as long from now on."""
    before = cluster.job(job)
    out.write_text("2")
    followed = cluster.wait_for(job, "a plan", lambda j: j.plan.id > before.plan.id, 90)
    told = next(line for line in cluster.log(job, 0).splitlines() if line.startswith(SLOWER_FROM))
    since = int(told.removeprefix(SLOWER_FROM))
    known = followed.plan.from_step - lead_steps(before.progress.step_s) - since + 1
    print(
        f"rank 0 slower from step {since}: a plan from {known} steps of telemetry, it holds "
        f"{followed.plan.from_step - since} steps after: {followed.plan.reason}",
        flush=True,
    )
    until_settled(cluster, job)
    show_plans(cluster, job, before.plan.id)
    print(f"settled: step {step_s(cluster, job, watch_s) * 1e3:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--computing", action="store_true", help="train the CNN of unequal.py, on this machine's cores")
    parser.add_argument("--base", type=float, default=0.35, help="with --computing: times all speeds, to leave room")
    parser.add_argument("--watch", type=float, default=12)
    options = parser.parse_args()
    base, name = (options.base, "unequal") if options.computing else (1.0, "paced")
    print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, {name}, speeds {SPEEDS} times {base:g}")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([speed * base for speed in SPEEDS])
        script, out = HERE / "scripts" / f"{name}_train.py", Path(folder, "out")
        job = cluster.submit(str(script), str(out), str(SECONDS), workers=(3, 3), checkpoint_every=0)
        cluster.wait_for(job, "a plan", lambda j: bool(j.plan.id))
        cluster.client.adjust(job, shares=[1.0, 1.0, 1.0])  # before the first step: an even start
        even = cluster.wait_for_step(job, 60, deadline_s=90)
        even_s = step_s(cluster, job, options.watch)
        print(f"even split: step {even_s * 1e3:.1f} ms, shares {[round(w.share, 2) for w in even.workers]}", flush=True)

        pinned = cluster.client.adjust(job, unpin=["shares"]).plan.id
        settled = until_settled(cluster, job)
        show_plans(cluster, job, pinned)
        best_s = step_s(cluster, job, options.watch)
        print(
            f"settled after {settled.plan.id - pinned} plans: step {best_s * 1e3:.1f} ms, {even_s / best_s:.2f} times "
            f"faster than the even split",
            flush=True,
        )

        if not options.computing:
            slow_down(cluster, job, out, options.watch)
        cluster.client.cancel(job)


if __name__ == "__main__":
    main()
