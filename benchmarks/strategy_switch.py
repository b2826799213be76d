"""A running job changes its strategy in place, again and again: how long its workers make no step.

    python benchmarks/strategy_switch.py [--rounds 3] [--step-s 0.05] [--hidden 1024]

A controller with its etcd and two agents of two islands run on this machine. A job of two workers trains an MLP with
AdamW, and changes through all six pairs of `dense`, `local-steps` and `compressed` (`atoll adjust JOB --strategy`).
Seconds from the beginning of the last step before a change to the beginning of the second one after it, less the median
of two steps: the time in which training stood still, by the wall clock of one machine. The slower worker counts."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import torch
from cluster import Cluster
from lab.machine import processor

from atoll.v1 import common_pb2 as common

WAY = ("local-steps", "compressed", "dense", "compressed", "local-steps", "dense")
"""After `dense`: each of the six changes once."""
STEPS_BETWEEN = 15


def paused_s(path: Path, step: int) -> float:
    """Return the seconds in which a worker made no step, around the change with which step `step` began."""
    begun = {int(number): float(unix_s) for number, unix_s in map(str.split, path.read_text().splitlines())}
    usual = statistics.median(
        begun[after] - begun[before]
        for before, after in pairwise(range(step - 11, step - 1))
        if before in begun and after in begun
    )
    return begun[step + 1] - begun[step - 1] - 2 * usual


def changes(cluster: Cluster, job: str) -> list[common.Event]:
    return [event for event in cluster.client.events(job) if event.kind == common.EVENT_KIND_STRATEGY_CHANGED]


def change_to(cluster: Cluster, job: str, wanted: str, count: int) -> None:
    """Change the job's strategy, and wait until it has changed so many times."""
    cluster.client.adjust(job, strategy=wanted)
    cluster.wait_for(job, wanted, lambda _: len(changes(cluster, job)) == count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="switch-") as folder, Cluster(Path(folder)) as cluster:
        cluster.controller()
        for name, island in (("agent-0", "here"), ("agent-1", "there")):
            cluster.agent(name, 1.0, "--island", island)
        cluster.wait_for_nodes(2)
        out = Path(folder) / "out"
        out.mkdir()
        script = str(HERE / "scripts" / "strategy_switch_train.py")
        arguments = (str(out), str(given.step_s), str(given.hidden))
        checkpoint = common.CheckpointPolicy(every_steps=200, keep=2, memory_replicas=2)
        job = cluster.submit(script, *arguments, workers=(2, 2), checkpoint=checkpoint, strategy="dense")
        seen = cluster.wait_for_step(job, STEPS_BETWEEN)
        for count, wanted in enumerate(WAY * given.rounds, start=1):
            change_to(cluster, job, wanted, count)
            seen = cluster.wait_for_step(job, changes(cluster, job)[-1].step + STEPS_BETWEEN)
        took: dict[tuple[str, str], list[float]] = {}
        for event in changes(cluster, job):
            paused = max(paused_s(out / str(rank), event.step) for rank in (0, 1))
            took.setdefault((event.strategies[0], event.strategies[1]), []).append(paused)
        cluster.client.cancel(job)
        cluster.wait_for_end(job)
    run_note = f"{seen.run} run" + "s" * (seen.run > 1)
    print(
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo, {run_note}"
    )
    for (before, after), times in took.items():
        print(f"{before} -> {after}: median {statistics.median(times):.2f} s, most {max(times):.2f} s, of {len(times)}")


if __name__ == "__main__":
    main()
