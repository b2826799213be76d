"""A worker is killed (SIGKILL), the others go on in place, and another one joins them in its stead: how long they stand
still for either, on a real local cluster.

    python benchmarks/membership.py [--kills 30] [--step-s 0.05] [--strategy stale-sparse]

Each kill is of a new job of three workers, which go on as two (`--workers 2:3`); a worker in turn. Its agent lives on
and its device is free again, so another starts there and is taken in at a step boundary (under `dense`). Seconds
from the signal until both survivors have completed the first step of the new view, by the wall clock of one machine;
the parts by the controller's event; and how many complete steps were trained again, where the strategy goes back to
what is whole in memory. Of the joiner: by how much the others' step in which it is taken in is longer than theirs were
before the kill, and how much longer their median step is while it starts, imports and builds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import torch
from cluster import Cluster
from lab.machine import processor

from atoll.v1 import common_pb2 as common

PARTS = ("noticed", "aborted", "told", "formed", "agreed", "first step")
TRAINS_AT = 20


def completed(path: Path, step: int, killed_s: float) -> tuple[float, int]:
    """When a rank had completed this step, with which the view began: it began the next one. And how many it had begun
    after it before the kill. Raises SystemExit where it never did."""
    lines = [line.split() for line in path.read_text().split("\n")[:-1]]  # the last line may be half written
    begun = [(int(number), float(unix_s)) for number, unix_s in lines]
    again = max((at for at, (number, _) in enumerate(begun) if number == step), default=len(begun))
    if again + 1 >= len(begun):
        raise SystemExit(f"{path} has no step after {step}")
    return begun[again + 1][1], max(number for number, unix_s in begun if unix_s < killed_s) - step


def joined(path: Path, broken: int, step: int, killed_s: float) -> tuple[float, float]:
    """Of a survivor that trained on from step `broken`, and was in step `step` when another joined: seconds that this
    took, and its median step meanwhile over that before the kill."""
    begun = [(int(number), float(unix_s)) for number, unix_s in map(str.split, path.read_text().split("\n")[:-1])]
    lasted = [(at, next_at, next_s - at_s) for (at, at_s), (next_at, next_s) in pairwise(begun)]
    calm = statistics.median(s for (_, _, s), (_, at_s) in zip(lasted, begun, strict=False) if at_s < killed_s - s)
    meanwhile = [s for at, _, s in lasted if broken < at < step - 1]
    return max(s for _, next_at, s in lasted if step <= next_at <= step + 1) - calm, statistics.median(meanwhile) / calm


def went_on(
    cluster: Cluster, folder: Path, victim: int, step_s: float, strategy: str
) -> tuple[float, int, dict[str, float], list[tuple[float, float]]]:
    """Of one job: from the kill to the survivors' next completed step, complete steps that were trained again, the
    parts, and of each survivor what the joiner cost. Raises SystemExit where the run did not go on in place."""
    out = folder / f"out-{time.monotonic_ns()}"
    out.mkdir()
    script = str(HERE / "scripts" / "membership_train.py")
    checkpoint = common.CheckpointPolicy(keep=3, memory_replicas=2)
    job = cluster.submit(script, str(out), str(step_s), workers=(2, 3), checkpoint=checkpoint, strategy=strategy)
    before = cluster.wait_for_step(job, TRAINS_AT)
    pids = {worker.rank: worker.status.pid for worker in before.workers}
    if len(pids) != 3:
        raise SystemExit(f"{job} trains on {len(pids)} workers, not on three")
    killed_s = time.time()
    os.kill(pids[victim], signal.SIGKILL)
    cluster.wait_for(
        job,
        "the change in place",
        lambda _: changed(cluster, job, common.EVENT_KIND_CHANGED_IN_PLACE) is not None or over(cluster, job),
    )
    seen = changed(cluster, job, common.EVENT_KIND_CHANGED_IN_PLACE)
    if seen is None:
        raise SystemExit(f"{job} was started again:\n{cluster.story(job)}")
    survivors = [out / str(rank) for rank in pids if rank != victim]
    ends = [completed(path, seen.step, killed_s) for path in survivors]
    costs = []
    if strategy == "dense":
        cluster.wait_for(
            job,
            "who joins",
            lambda _: changed(cluster, job, common.EVENT_KIND_CHANGED_AT_BOUNDARY) is not None or over(cluster, job),
        )
        if (taken_in := changed(cluster, job, common.EVENT_KIND_CHANGED_AT_BOUNDARY)) is None:
            raise SystemExit(f"{job} was started again:\n{cluster.story(job)}")
        costs = [joined(path, seen.step + 1, taken_in.step, killed_s) for path in survivors]
    cluster.client.cancel(job)
    cluster.wait_for_end(job)
    parts = {part.name: part.seconds for part in seen.parts}
    return max(end_s for end_s, _ in ends) - killed_s, max(steps for _, steps in ends), parts, costs


def changed(cluster: Cluster, job: str, kind: common.EventKind.ValueType) -> common.Event | None:
    """Return the newest change of members of that kind."""
    found = [event for event in cluster.client.events(job) if event.kind == kind]
    return found[-1] if found else None


def over(cluster: Cluster, job: str) -> bool:
    """Whether it is another run: this one did not go on."""
    return cluster.job(job).run > 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--strategy", default="dense")
    given = parser.parse_args()
    took, parts, again, costs = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, 1.0, 1.0])
        for number in range(given.kills):
            one_s, steps, of, cost = went_on(cluster, Path(folder), number % 3, given.step_s, given.strategy)
            again.append(steps)
            costs += cost
            took.append(one_s)
            parts.append(of)
            print(f"  {number + 1} of {given.kills}: {one_s:.3f} s, {of}", file=sys.stderr, flush=True)
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo")
    print(
        f"{given.strategy}, {len(took)} kills, steps of {given.step_s} s: median {statistics.median(took):.2f} s, "
        f"most {max(took):.2f} s; trained again: median {statistics.median(again):g} steps, most {max(again)}"
    )
    print("parts, medians: " + ", ".join(f"{statistics.median(of[part] for of in parts):.2f} {part}" for part in PARTS))
    if costs:
        pauses, meanwhile = zip(*costs, strict=True)
        print(
            f"taken in: the others' step is longer by median {statistics.median(pauses):.2f} s, most {max(pauses):.2f} "
            f"s; meanwhile their steps take {100 * (statistics.median(meanwhile) - 1):.1f} % longer"
        )


if __name__ == "__main__":
    main()
