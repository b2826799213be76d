"""The race's task by torchft's own DiLoCo, in real processes: what benchmarks/race.py's twin of it is held against.

    pip install torchft-nightly && python benchmarks/race_torchft.py [--size XXS] [--steps 400] [--seeds 1] [--every 10]
        [--rate 2e-3] [--outer 0.7] [--momentum 0.9]

Each island is a replica group of one process of one thread (gloo, all four needed), with its own domain (P1), the
weights, batches, inner optimizer and held-out windows of race.py; the lighthouse is in this process. Told is the
held-out loss of the model that all groups share after the last outer step, and of the same in race.py's DiLoCo.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import sys
import tempfile
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "scripts")]

import torch
from racing.course import Course, run
from racing.field import Runner
from racing.inner import Setting
from racing.local import DiLoCo
from racing.task import SIZES, Task

ISLANDS = 4
DEADLINE_S = 900.0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="XXS")
    parser.add_argument("--steps", type=int, default=400, help="a multiple of --every")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--every", type=int, default=10, help="steps between two outer ones")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--outer", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    return parser


def main() -> int:
    options = arguments().parse_args()
    if importlib.util.find_spec("torchft") is None:
        print("race_torchft: there is no torchft here; pip install torchft-nightly", file=sys.stderr)
        return 2
    if options.steps % options.every:
        print(f"race_torchft: {options.steps} steps end between two outer ones of {options.every}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}  {platform.machine()}  torchft {metadata.version('torchft-nightly')}")
    print(f"DiLoCo H = {options.every}, {options.size}, {ISLANDS} islands, {options.steps} steps")
    for seed in map(int, options.seeds.split(",")):
        theirs = raced(options, seed)
        print(f"seed {seed}: torchft {theirs:.4f}, race.py {ours(options, seed):.4f}", flush=True)
    return 0


def raced(options: argparse.Namespace, seed: int) -> float:
    """What torchft's islands come to."""
    from race_torchft_train import train
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=ISLANDS, join_timeout_ms=60_000)
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder, f"{island}.json") for island in range(ISLANDS)]
        processes = [
            context.Process(target=train, args=(path, island, seed, lighthouse.address(), vars(options)))
            for island, path in enumerate(told)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(DEADLINE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
            lighthouse.shutdown()
        losses = {float(json.loads(path.read_text())) for path in told if path.exists()}
    if len(losses) != 1:
        raise SystemExit(f"race_torchft: the islands of seed {seed} ended with {sorted(losses)}, not with one model")
    return losses.pop()


def ours(options: argparse.Namespace, seed: int) -> float:
    course = Course(options.size, "P1", ISLANDS, options.steps, options.steps, seed)
    runner = Runner(
        lambda replicas, one: DiLoCo(
            replicas, every=options.every, outer_learning_rate=one.outer_learning_rate, momentum=one.momentum
        )
    )
    setting = Setting(options.rate, options.outer, options.momentum)
    return run(course, Task(SIZES[options.size], seed), runner, setting).losses[-1][1]


if __name__ == "__main__":
    sys.exit(main())
