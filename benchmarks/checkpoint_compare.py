"""Atoll's checkpoints in memory against torch.distributed.checkpoint: the time that a failure wastes, side by side.

    python benchmarks/checkpoint_compare.py [--short] [--steps 60] [--width 1024] [--batch 2048]
    python benchmarks/checkpoint_compare.py --waits-s 0.35 --batch 64    passes wait, as where a GPU computes

T = t_checkpoint + 1/(2 f) + t_retrieve (Gemini, Eq. 6.1): what is lost on the average when all workers die. The same
model and steps for each way, in a local cluster of two agents: steps without checkpoints, twice as many with, then
again without. Every way checkpoints as often as it can: it begins when the one before is complete; Atoll only as often
as costs the steps one percent, as it judges it itself.

  atoll        in memory, own and one copy on the other machine, encrypted over the loopback
  dcp-disk     torch.distributed.checkpoint.async_save to the local disk, ranks share the work
  dcp-remote   the same to a storage whose network is as slow for this model as the paper's 20 Gbit/s was for its own:
               there the state (128 GPUs x 9.4 GB) took 7.76 steps of 62 s, and so it takes 7.76 steps here
  save         torch.save by rank 0 and fsync, everybody waits

Retrieval is from when all processes are up until every rank has the state in its memory; disks are read anew, not from
the page cache. Atoll's is of own memory, and of the other machine's for a machine that lost its own; T has the longer.
T leaves out what checkpoints cost the steps, which has columns of its own, and that disks are lost with machines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import torch
from cluster import Cluster
from lab.machine import processor

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

WAYS = ("atoll", "dcp-disk", "dcp-remote", "save")


def ended(cluster: Cluster, out: Path, way: str, *numbers: object) -> None:
    policy = common.CheckpointPolicy(every_steps=0, keep=1, memory_replicas=2 if way == "atoll" else 0)
    script = str(HERE / "scripts" / "compare_train.py")
    job = cluster.submit(script, str(out), way, *map(str, numbers), workers=(2, 2), checkpoint=policy)
    seen = cluster.wait_for_end(job, 150)
    if seen.phase != pb.PHASE_DONE:
        raise SystemExit(f"{way} failed: {seen.reason}\n{cluster.story(job)}\n{cluster.log(job)}")


def measured(
    cluster: Cluster, folder: Path, way: str, steps: int, width: int, batch: int, pace_bps: float, waits_s: float
) -> dict[str, Any]:
    """Figures in seconds. retrieve_s: for atoll from own memory and from the other machine's."""
    out = folder / f"{way}.json"
    ended(cluster, out, way, steps, width, batch, pace_bps, waits_s)
    told: dict[str, Any] = json.loads(out.read_text())
    if way == "atoll":
        told["retrieve_s"] = [json.loads(out.with_suffix(f".run-{number}").read_text()) for number in (2, 3)]
    else:
        ended(cluster, out, way, 8, width, batch, told["pace_bps"], waits_s)
        told["retrieve_s"] = [json.loads(out.with_suffix(".retrieved").read_text())]
    told["wasted_s"] = told["checkpoint_s"] + told["interval_s"] / 2 + max(told["retrieve_s"])
    return told


def row(way: str, told: dict[str, Any], least_s: float) -> str:
    cells = [
        way,
        f"{1e3 * told['off_s']:.0f} ms",
        f"{100 * (told['on_s'] / told['off_s'] - 1):+.1f} %",
        f"{1e3 * told['held_s']:.1f} ms",
        f"{1e3 * told['checkpoint_s']:.0f} ms",
        f"{1e3 * told['interval_s']:.0f} ms ({told['interval_s'] / told['on_s']:.1f} steps)",
        " / ".join(f"{1e3 * one:.0f} ms" for one in told["retrieve_s"]),
        f"{told['wasted_s']:.2f} s",
        f"{told['wasted_s'] / least_s:.1f} x",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--waits-s", type=float, default=0.0, help="of a step, as if another device computed")
    parser.add_argument("--short", action="store_true", help="few steps of a small model, to see that it works")
    options = parser.parse_args()
    if options.short:
        options.steps, options.width, options.batch = 40, 256, 512
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, 1.0])
        sizes = (options.steps, options.width, options.batch)
        found: dict[str, dict[str, Any]] = {}
        pace_bps = 0.0  # the first finds it, from its own steps; it is the same for all
        for way in WAYS:
            found[way] = measured(cluster, Path(folder), way, *sizes, pace_bps, options.waits_s)
            pace_bps = found[way]["pace_bps"]
    remote = found["dcp-remote"]
    print(
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}; two workers of "
        f"one thread each, state {remote['bytes'] / 1e6:.0f} MB; the remote's network has "
        f"{remote['pace_bps'] / 1e6:.0f} Mbit/s\n"
    )
    print(
        "| way | step without | step with | held up, each step | checkpoint | interval | retrieval | T | of Atoll's |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for way, told in found.items():
        print(row(way, told, found["atoll"]["wasted_s"]))


if __name__ == "__main__":
    main()
