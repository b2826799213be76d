"""A fourth device joins a run of three: one of a twentieth of their speed, then one of half.

    python benchmarks/admission.py [--watch 20]

A real local cluster trains with 256 samples a step. The passes of its script wait in place of computing
(scripts/paced_train.py): five workers on the cores of a small machine would slow each other down, as devices do
not. Steps are those of rank 0 as telemetry has them: before, medians over the last `--watch` seconds; after, from
the time that the job settled.
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
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster

from atoll.agent.telemetry.devices import cpu_model
from atoll.v1 import jobs_pb2 as pb

SECONDS = 3600
JOIN_S = 60.0


def watched(cluster: Cluster, job: str, seconds: float) -> tuple[float, float]:
    """(median seconds of a step, median samples a second) over so long."""
    steps, rates, ends = [], [], time.monotonic() + seconds
    while time.monotonic() < ends:
        progress = cluster.job(job).progress
        if progress.step_s:
            steps.append(progress.step_s)
            rates.append(progress.samples_per_s)
        time.sleep(0.5)
    return statistics.median(steps), statistics.median(rates)


def verdict(cluster: Cluster, job: str, node: str) -> str:
    """What the job said of the node's device, waited for."""

    def said(_: pb.Job) -> bool:
        return any(event.device == f"{node}/0" for event in cluster.client.events(job))

    cluster.wait_for(job, f"a verdict on {node}", said, JOIN_S)
    return next(event.text for event in cluster.client.events(job) if event.device == f"{node}/0")


def until_settled(cluster: Cluster, job: str, run: int, seconds: float) -> None:
    """Until this run, or one that follows within so long, has trained for so long."""
    ends = time.monotonic() + seconds
    cluster.wait_for(job, "a verdict carried out", lambda j: j.run > run or time.monotonic() > ends, seconds + 5)
    cluster.wait_for(job, "training", lambda j: j.phase == pb.PHASE_RUNNING and j.progress.step_s > 0)
    began, ends = cluster.job(job).progress.step, time.monotonic() + seconds
    cluster.wait_for(job, "20 steps", lambda j: j.progress.step > began + 20 and time.monotonic() > ends, 120)


def show(what: str, step_s: float, rate: float, job: pb.Job) -> None:
    shares = " ".join(f"{worker.share:.2f}" for worker in job.workers)
    print(
        f"{what:28} step {step_s * 1e3:6.1f} ms  {rate:6.0f} samples/s  run {job.run}, {len(job.workers)} workers, "
        f"plan {job.plan.id}, shares {shares}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--watch", type=float, default=20)
    options = parser.parse_args()
    print(f"{datetime.date.today()}  {cpu_model()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * 3)
        out = Path(folder, "steps.json")
        script = str(HERE / "scripts" / "paced_train.py")
        job = cluster.submit(script, str(out), str(SECONDS), workers=(1, 8), checkpoint_every=0)
        until_settled(cluster, job, 1, 5)
        before, rate = watched(cluster, job, options.watch)
        show("three at speed 1", before, rate, cluster.job(job))
        rates = {"three": rate}
        for name, speed in (("twentieth", 0.05), ("half", 0.5)):
            cluster.agent(name, speed)
            print(f"  {verdict(cluster, job, name)}", flush=True)
            until_settled(cluster, job, cluster.job(job).run, 10)
            step_s, rates[name] = watched(cluster, job, options.watch)
            show(f"and one at {speed:g}", step_s, rates[name], cluster.job(job))
        slow, half = (rates[name] / rates["three"] - 1 for name in ("twentieth", "half"))
        print(f"samples a second: {slow:+.1%} with the slow one, {half:+.1%} with the other\n{cluster.story(job)}")
        cluster.client.cancel(job)


if __name__ == "__main__":
    main()
