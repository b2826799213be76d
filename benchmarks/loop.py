"""The live loop on workers of unequal speed: even start, plans until the best split, and a second load in mid-run.

    python benchmarks/loop.py [--base 1.0] [--watch 12]

A real local cluster (controller, etcd, three agents) trains the CNN of unequal.py with 256 samples a step, one
thread a worker, at speeds 1 : 0.6 : 0.3 times `--base`. The split is pinned even, measured, and left to the
controller: its plans are counted until no better one follows. Then another program takes half of the core that the
fastest worker is alone on. Steps are rank 0's, from telemetry; what a plan predicted is held against the median of
its own steps.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "e2e")]

import psutil
from cluster import Cluster
from lab.machine import processor

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


def settle(cluster: Cluster, job: str, deadline_s: float = 180) -> pb.Job:
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
    for decided in cluster.client.plans(job):
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


def pin_to_cores(cluster: Cluster) -> None:
    """The fastest agent, and the worker it will start, has a core of its own, as a device would; the others share."""
    cores = sorted(os.sched_getaffinity(0))
    for index in range(len(SPEEDS)):
        for thread in psutil.Process(cluster.processes[f"agent-{index}"].pid).threads():
            os.sched_setaffinity(thread.id, {cores[-1]} if index == 0 else set(cores[:-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=float, default=1.0)
    parser.add_argument("--watch", type=float, default=12)
    options = parser.parse_args()
    print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, speeds {SPEEDS} times {options.base:g}")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([speed * options.base for speed in SPEEDS])
        pin_to_cores(cluster)
        script = str(HERE / "scripts" / "unequal_train.py")
        out = str(Path(folder, "steps.json"))
        job = cluster.submit(script, out, str(SECONDS), workers=(3, 3), checkpoint_every=0)
        cluster.wait_for(job, "a plan", lambda j: bool(j.plan.id))
        cluster.client.adjust(job, shares=[1.0, 1.0, 1.0])  # before the first step: an even start
        even = cluster.wait_for_step(job, 60, deadline_s=90)
        even_s = step_s(cluster, job, options.watch)
        print(f"even split: step {even_s * 1e3:.1f} ms, shares {[round(w.share, 2) for w in even.workers]}", flush=True)

        pinned = cluster.client.adjust(job, unpin=["shares"]).plan.id
        settled = settle(cluster, job)
        show_plans(cluster, job, pinned)
        best_s = step_s(cluster, job, options.watch)
        print(
            f"settled after {settled.plan.id - pinned} plans: step {best_s * 1e3:.1f} ms, {even_s / best_s:.2f} times "
            f"faster than the even split",
            flush=True,
        )

        core = max(os.sched_getaffinity(0))
        load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            os.sched_setaffinity(load.pid, {core})
            before = cluster.job(job)
            followed = cluster.wait_for(job, "a plan", lambda j: j.plan.id > before.plan.id, 90)
            print(
                f"second load at step {before.progress.step}: the next plan was made at step "
                f"{followed.plan.from_step - 5}, {followed.plan.from_step - 5 - before.progress.step} steps later: "
                f"{followed.plan.reason}",
                flush=True,
            )
            settle(cluster, job)
            show_plans(cluster, job, before.plan.id)
            print(f"settled under load: step {step_s(cluster, job, options.watch) * 1e3:.1f} ms", flush=True)
        finally:
            load.kill()
            load.wait(5)
        cluster.client.cancel(job)


if __name__ == "__main__":
    main()
