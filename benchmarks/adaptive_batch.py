"""Time to accuracy of the image example on unequal devices: fixed batches, Atoll's, and AdaptDL's rule.

    python benchmarks/adaptive_batch.py [--seeds 3] [--target 0.965] [--limit-s 60] [--policies fixed:64,adaptdl,atoll]

A real local cluster of three workers of speed 1 : 0.6 : 0.3 trains a small CNN on MNIST; passes compute the true
gradients, and take the time of such devices (scripts/paced_mnist.py). `fixed:B`: Atoll splits a total batch of B as the
devices are fast; a batch other than the script's own gets its learning rate times the square root of their ratio.
`atoll`: `[adapt] batch = [64, 1024]` beginning with 64. `adaptdl`: the same, decided by AdaptDL's rule with even split
(scripts/adaptdl_controller.py). Time runs from rank 0's first step; accuracy is that of rank 0's weights on 5,000 test
images, looked at twice a second by this process. `--seeds 1` is the short form.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
EXAMPLES = HERE.parent / "examples"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(EXAMPLES), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import numpy as np
import torch
from cluster import Cluster
from data import mnist
from held_ports import free_port
from lab.machine import processor
from paced_mnist import SPEEDS, make

from atoll.v1 import common_pb2 as common

OWN_BATCH, MOST = 64, 1024
LEARNING_RATE = 0.2  # of OWN_BATCH
IMAGES = 5000


@dataclass(frozen=True, slots=True)
class Reached:
    """Of one run: seconds to the target, None where it was not reached; steps and total batch then; best accuracy."""

    seconds: float | None
    step: int
    total_batch: int
    accuracy: float


class Judge:
    """Measures the accuracy of weights that rank 0 wrote. model: a name in paced_mnist.MODELS."""

    def __init__(self, model: str = "cnn") -> None:
        images, labels = mnist()[1].tensors
        self._images, self._labels = images[:IMAGES], labels[:IMAGES]
        self._model = make(0, model)

    @torch.no_grad()
    def accuracy(self, weights: np.ndarray) -> float:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), self._model.parameters())
        return float((self._model(self._images).argmax(1) == self._labels).float().mean())


@contextmanager
def cluster_of(policy: str) -> Iterator[Cluster]:
    """Three equal agents: the script makes the devices unequal."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        if policy == "adaptdl":
            address = f"127.0.0.1:{free_port()}"
            cluster.addresses.append(address)
            command = (sys.executable, str(HERE / "scripts" / "adaptdl_controller.py"), "controller")
            cluster.start(
                "controller", (*command, "--listen", address, "--data-dir", str(cluster.folder / "controller"))
            )
        else:
            cluster.controller()
        for index in range(len(SPEEDS)):
            cluster.agent(f"agent-{index}")
        cluster.wait_for_nodes(len(SPEEDS))
        yield cluster


def train(cluster: Cluster, judge: Judge, policy: str, seed: int, target: float, limit_s: float) -> Reached:
    name, _, size = policy.partition(":")
    batch = int(size or OWN_BATCH)
    rate = LEARNING_RATE * (batch / OWN_BATCH) ** 0.5
    adapt = common.Adaptation(min_batch=OWN_BATCH, max_batch=MOST) if name != "fixed" else None
    out = cluster.folder / f"{name}-{batch}-{seed}"
    out.mkdir()
    job = cluster.submit(
        str(HERE / "scripts" / "paced_mnist.py"),
        *(str(out), str(batch), str(rate), str(seed)),
        workers=(len(SPEEDS), len(SPEEDS)),
        checkpoint=common.CheckpointPolicy(memory_replicas=0),
        env={"PYTHONPATH": str(EXAMPLES)},
        adapt=adapt,
        name=name,
    )
    cluster.wait_for_step(job, 1)
    reached = watch(judge, out, target, limit_s)
    if name != "fixed":
        print("\n".join(f"    {line}" for line in cluster.story(job).splitlines() if "[plan]" in line), flush=True)
    cluster.client.cancel(job)
    cluster.wait_for_end(job)
    return reached


def watch(judge: Judge, out: Path, target: float, limit_s: float) -> Reached:
    """Looks at the weights as they come."""
    best, looked_at = Reached(None, 0, 0, 0.0), ""
    silent_s = time.monotonic() + limit_s + 30
    while time.monotonic() < silent_s:
        for path in sorted(path for path in out.glob("*.npy") if path.name > looked_at):
            looked_at = path.name
            seconds, step, total = path.stem.split("-")
            accuracy = judge.accuracy(np.load(path))
            if accuracy >= target:
                return Reached(float(seconds), int(step), int(total), accuracy)
            best = max(best, Reached(None, int(step), int(total), accuracy), key=lambda one: one.accuracy)
            if float(seconds) > limit_s:
                return best
        time.sleep(0.2)
    raise SystemExit(f"{out} got no weights any more")


def row(policy: str, found: list[Reached]) -> str:
    times = [one.seconds if one.seconds is not None else float("inf") for one in found]
    steps = statistics.median(one.step for one in found)
    batch = statistics.median(one.total_batch for one in found)
    shown = f"{statistics.median(times):.1f} s [{min(times):.1f}–{max(times):.1f}]"
    if float("inf") in times:
        shown += f", {times.count(float('inf'))} of {len(times)} not reached"
    return f"| {policy} | {shown} | {steps:.0f} | {batch:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.965)
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--policies", default=f"fixed:{OWN_BATCH},fixed:256,fixed:512,adaptdl,atoll")
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, speeds {SPEEDS}, to {options.target:.1%} of "
        f"{IMAGES} test images, medians of {options.seeds} seeds [range]"
    )
    judge = Judge()
    rows = []
    for policy in options.policies.split(","):
        with cluster_of(policy) as cluster:
            found = []
            for seed in range(1, options.seeds + 1):
                found.append(train(cluster, judge, policy, seed, options.target, options.limit_s))
                print(f"  {policy} seed {seed}: {found[-1]}", flush=True)
        rows.append(row(policy, found))
    print("| total batch | time to accuracy | steps | batch at the end |\n|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
