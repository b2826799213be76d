"""A worker of a job that needs all its workers is killed (SIGKILL): how long the others stand still until another one
trains in its stead, on a real local cluster.

    python benchmarks/replacement.py [--kills 12] [--step-s 0.05] [--cold]

One job of three workers (`--workers 3:3`) on four agents; a worker in turn, each once the processes that wait for
launches (docs/operations.md) have nothing more to import. A replacement starts on the standby's device. With `--cold` a
variable of the job forbids such processes. Seconds from the signal until both survivors have completed the next step,
by the wall clock of one machine; the parts by the controller's event.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import psutil
import torch
from cluster import Cluster
from fork_servers import wait_for_fork_servers
from lab.machine import processor
from membership import PARTS, changed, completed, over

from atoll.v1 import common_pb2 as common

AGENTS = 4


def replaced(cluster: Cluster, job: str, out: Path, number: int, *, calm: bool) -> tuple[float, dict[str, float]]:
    """Kill one worker: how long the others stand still, and the parts. Raises SystemExit where the run is another."""
    kind = common.EVENT_KIND_CHANGED_IN_PLACE
    before = changed(cluster, job, kind)
    trains = cluster.wait_for_step(job, cluster.job(job).progress.step + 20)
    pids = {one.rank: one.status.pid for one in trains.workers if one.status.pid and psutil.pid_exists(one.status.pid)}
    if calm:
        wait_for_fork_servers(cluster.folder, AGENTS)
    victim = sorted(pids)[number % len(pids)]
    killed_s = time.time()
    os.kill(pids[victim], signal.SIGKILL)

    cluster.wait_for(
        job, "the change in place", lambda _: changed(cluster, job, kind) != before or over(cluster, job), 120
    )
    found = changed(cluster, job, kind)
    if found is None or over(cluster, job):
        raise SystemExit(f"{job} was started again:\n{cluster.story(job)}")
    cluster.wait_for_step(job, found.step + 5)
    parts = {part.name: part.seconds for part in found.parts}
    survivors = [out / str(rank) for rank in pids if rank != victim]
    return max(completed(path, found.step, killed_s)[0] for path in survivors) - killed_s, parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    took, parts, load = [], [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name)) as cluster:
        folder = Path(name)
        cluster.local([1.0] * AGENTS)
        out = folder / "out"
        out.mkdir()
        job = cluster.submit(
            str(HERE / "scripts" / "membership_train.py"), str(out), str(given.step_s), workers=(3, 3),
            checkpoint=common.CheckpointPolicy(keep=3), env={"PYTHONHASHSEED": "0"} if given.cold else {},
        )  # fmt: skip
        for number in range(given.kills):
            took_s, found = replaced(cluster, job, out, number, calm=not given.cold)
            took.append(took_s)
            parts.append(found)
            print(f"  {number + 1} of {given.kills}: {took_s:.2f} s, {found}", file=sys.stderr, flush=True)
        cluster.client.cancel(job)
        cluster.wait_for_end(job)
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {load:.0f}, torch {torch.__version__}")
    print(
        f"{'cold' if given.cold else 'with processes that wait'}, {len(took)} kills, steps of {given.step_s} s: "
        f"median {statistics.median(took):.2f} s, most {max(took):.2f} s"
    )
    print("medians: " + ", ".join(f"{statistics.median(of[part] for of in parts):.2f} {part}" for part in PARTS))


if __name__ == "__main__":
    main()
