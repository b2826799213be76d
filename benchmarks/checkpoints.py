"""What checkpoints in memory cost a step, and how soon a job trains again after its workers were killed.

    python benchmarks/checkpoints.py [--strategy dense] [--blocks 40] [--kills 10] [--width 1024] [--batch 2048]

A real local cluster of two agents, one thread each, on one machine: copies cross the loopback, encrypted, and cost
processor time that on real machines would be another's. The paired figure is the mean step of a block with the tier
against that of the blocks without before and after it, in one run; its error is that of the mean over all pairs. Kills
are of all workers at once, with nothing on disk, so that what goes on comes from memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e")]

import torch
from cluster import Cluster, kill, wait_until
from lab.machine import processor
from recovery import steps

from atoll.v1 import common_pb2 as common


def cost(strategy: str, blocks: int, width: int, batch: int, replicas: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, 1.0])
        out = Path(folder, "steps.json")
        script, arguments = (
            str(HERE / "scripts" / "checkpoints_train.py"),
            (str(out), *map(str, (blocks, width, batch))),
        )
        policy = common.CheckpointPolicy(every_steps=0, keep=1, memory_replicas=replicas)
        job = cluster.submit(script, *arguments, workers=(2, 2), checkpoint=policy, strategy=strategy)
        ended = cluster.wait_for_end(job, 900)
        if not out.exists():
            raise SystemExit(f"the job failed: {ended.reason}\n{cluster.story(job)}\n{cluster.log(job)}")
        told = json.loads(out.read_text())
    means = [statistics.fmean(block) for block in told["took"]][4:]  # the first pay for memory and the first plan
    pairs = [means[n] / ((means[n - 1] + means[n + 1]) / 2) - 1 for n in range(2, len(means) - 1, 2)]
    mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    print(
        f"  replicas {replicas}: {told['parameters'] / 1e6:.1f} M parameters, "
        f"state {told['shared_bytes'] / 1e6:.0f} MB shared and {told['own_bytes'] / 1e6:.0f} MB of each rank's own, "
        f"step {1e3 * statistics.median(means[1::2]):.0f} ms without; every {told['every']} steps in the end, "
        f"{1e3 * told['cost_s']:.1f} ms each, {told['copied_bytes'] / told['steps'] / 1e6:.2f} MB copied a step; "
        f"{100 * statistics.median(pairs):+.2f} % median, {100 * mean:+.2f} ± {100 * error:.2f} % mean of "
        f"{len(pairs)} pairs",
        flush=True,
    )


def recovered(cluster: Cluster, strategy: str, folder: Path) -> tuple[float, int]:
    """Seconds from the SIGKILL of all workers to the next run's first step, and the completed steps lost."""
    out = Path(tempfile.mkdtemp(dir=folder))
    arguments = (f"--out={out}", "--epochs=1000", "--step-s=0.05")
    job = cluster.submit("tiny.py", *arguments, workers=(2, 2), checkpoint_every=0, strategy=strategy)
    seen = cluster.wait_for(job, "20 steps in memory", lambda j: j.memory_step >= 20)
    killed_s = time.time()
    for worker in seen.workers:
        kill(worker.status.pid)
    wait_until("run 2", lambda: steps(out, 2), 60)
    first = steps(out, 2)[0]
    last = max(line["step"] for line in steps(out, 1))
    cluster.client.cancel(job)
    cluster.wait_for_end(job)
    return first["at"] - killed_s, max(0, int(last - first["step"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["dense", "stale-sparse"], default="dense")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2048)
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    if options.blocks:
        print(
            f"two workers, {options.strategy}, blocks of 20 steps with and without checkpoints in memory, "
            f"{options.blocks} blocks:"
        )
        for replicas in (1, 2):
            cost(options.strategy, options.blocks, options.width, options.batch, replicas)
    if options.kills:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
            cluster.local([1.0, 1.0])
            found = [recovered(cluster, options.strategy, Path(folder)) for _ in range(options.kills)]
        took, lost = sorted(one for one, _ in found), [one for _, one in found]
        print(
            f"all workers killed -> first step again: median {statistics.median(took):.2f} s, {took[0]:.2f} to "
            f"{took[-1]:.2f} s of {len(took)} kills; steps lost: median {statistics.median(lost):g}, "
            f"at most {max(lost)}"
        )


if __name__ == "__main__":
    main()
