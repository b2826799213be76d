"""Measures what checkpoints in memory cost a step, and how soon a job trains again after its workers were killed; with
--disk, what a checkpoint on disk costs the steps beside which it is written.

    python benchmarks/checkpoints.py [--strategy dense] [--blocks 40] [--kills 10] [--width 1024] [--batch 2048]
    python benchmarks/checkpoints.py --disk [--strategy dense] [--blocks 20] [--width 1024] [--batch 2048]

A real local cluster of two agents, one thread each, on one machine: copies cross the loopback, encrypted, and cost
processor time that on real machines would be another's. The paired figure is the mean step of a block with the tier
against that of the blocks without before and after it, in one run; its error is that of the mean over all pairs. Kills
are of all workers at once, with nothing on disk, so that what goes on comes from memory.

With --disk nothing is kept in memory, and every second block of 20 steps begins with a checkpoint on disk: rank 0
copies the state, so the first step of the block is longer, and its thread writes and hashes the copy. The directory is
under TMPDIR.
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
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import torch
from blocks import BLOCK
from cluster import Cluster, kill
from lab.machine import processor
from recovery import until_run_2

from atoll.v1 import common_pb2 as common

WARM_BLOCKS = 4
"""They pay for memory and the first plan."""


def trained(options: argparse.Namespace, policy: common.CheckpointPolicy, *more: str) -> dict[str, Any]:
    """What rank 0 told of a job of blocks."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, 1.0])
        out = Path(folder, "steps.json")
        arguments = (str(out), *map(str, (options.blocks, options.width, options.batch)), *more)
        script = str(HERE / "scripts" / "checkpoints_train.py")
        job = cluster.submit(script, *arguments, workers=(2, 2), checkpoint=policy, strategy=options.strategy)
        ended = cluster.wait_for_end(job, 900)
        if not out.exists():
            raise SystemExit(f"the job failed: {ended.reason}\n{cluster.story(job)}\n{cluster.log(job)}")
        told: dict[str, Any] = json.loads(out.read_text())
    return told


def in_pairs(told: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Mean steps of blocks, and each block with checkpoints against those without around it."""
    means = [statistics.fmean(block) for block in told["took"]][WARM_BLOCKS:]
    return means, [means[n] / ((means[n - 1] + means[n + 1]) / 2) - 1 for n in range(2, len(means) - 1, 2)]


def spread(pairs: list[float]) -> str:
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    return (
        f"{100 * statistics.median(pairs):+.2f} % median, {100 * statistics.fmean(pairs):+.2f} ± {100 * error:.2f} % "
        f"mean of {len(pairs)} pairs"
    )


def cost(options: argparse.Namespace, replicas: int) -> None:
    told = trained(options, common.CheckpointPolicy(every_steps=0, keep=1, memory_replicas=replicas))
    means, pairs = in_pairs(told)
    print(
        f"  replicas {replicas}: {told['parameters'] / 1e6:.1f} M parameters, "
        f"state {told['shared_bytes'] / 1e6:.0f} MB shared and {told['own_bytes'] / 1e6:.0f} MB of each rank's own, "
        f"step {1e3 * statistics.median(means[1::2]):.0f} ms without; every {told['every']} steps in the end, "
        f"{1e3 * told['cost_s']:.1f} ms each, {told['copied_bytes'] / told['steps'] / 1e6:.2f} MB copied a step; "
        f"{spread(pairs)}",
        flush=True,
    )


def cost_of_disk(options: argparse.Namespace) -> None:
    policy = common.CheckpointPolicy(every_steps=2 * BLOCK, keep=1, memory_replicas=0)
    told = trained(options, policy, "disk")
    means, pairs = in_pairs(told)
    blocks = list(zip(told["took"], told["writing"], strict=True))[WARM_BLOCKS:]
    without_s = statistics.median(means[1::2])
    first_s = statistics.median(took[0] for took, _ in blocks[::2])
    beside = [took for block, writing in blocks[::2] for took, busy in zip(block[1:], writing[1:], strict=True) if busy]
    lasts = statistics.median(sum(writing) for _, writing in blocks[::2])
    longer = f"{100 * (statistics.fmean(beside) / without_s - 1):+.1f} %" if beside else "none was seen"
    each_ms = 1e3 * BLOCK * without_s * statistics.fmean(pairs)
    print(
        f"  on disk: {told['parameters'] / 1e6:.1f} M parameters, step {1e3 * without_s:.0f} ms without; "
        f"the step that begins with the copy {1e3 * (first_s - without_s):+.1f} ms; still written as {lasts:g} steps "
        f"end; later steps beside writing: {longer}; blocks with one: {spread(pairs)}, {each_ms:.1f} ms each",
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
    return until_run_2(cluster, job, out, killed_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["dense", "stale-sparse"], default="dense")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2048)
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    if options.disk:
        print(f"two workers, {options.strategy}, {options.blocks} blocks of {BLOCK} steps:")
        cost_of_disk(options)
        return
    if options.blocks:
        print(
            f"two workers, {options.strategy}, blocks of {BLOCK} steps with and without checkpoints in memory, "
            f"{options.blocks} blocks:"
        )
        for replicas in (1, 2):
            cost(options, replicas)
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
