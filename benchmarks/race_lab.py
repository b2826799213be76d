"""The race's clock against a real network: seconds that steps take in shaped namespaces, beside what race.py counts.

    sudo env PATH=$PATH python benchmarks/race_lab.py [--rho 4,40] [--methods ddp,local-steps,...] [--step-s 0.5]
        [--for-s 60]

Four islands, a process of one thread in a namespace each, train a byte GPT of 0.9 M parameters over links on which a
dense float32 ring takes rho steps. A step of an island takes --step-s by waiting, so that two cores do not lie: a third
before the backward pass, the rest within it, layer by layer. `ddp`, `ddp-bf16` (in float16: gloo has no bfloat16) and
`powersgd-2` are torch's own, with its hooks; `local-steps` and `stale-sparse` Atoll's, by their defaults; of the
others, which Atoll does not have, what the race says is sent is sent, as a ring by gloo's all_reduce and as a gather by
its all_gather.

A cell is as many steps as the race takes --for-s seconds for, at least 6. The first 2 are left out, in which buckets
fill and connections are warmed up.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "scripts")]

import torch
from lab import network
from race_lab_train import LAB, WARM_UP, Asked
from racing.clock import Exchange, finished_s, link_of
from racing.clock import Network as Link
from racing.field import FIELD
from racing.inner import Replica
from racing.task import Batches, Task, shards

from atoll.errors import BadInput

ISLANDS: Final = 4
METHODS: Final = (
    "ddp", "ddp-bf16", "powersgd-2", "local-steps", "stale-sparse", "averaging-10", "diloco-10-4bit",
    "streaming-24-4bit", "sparseloco-10",
)  # fmt: skip
MOST_STEPS: Final = 50
LEAST_STEPS: Final = 6
BURST: Final = "16kb"  # less than a step's bytes of most, so that the bucket is no second link
FRAMED: Final = 1514 / 1448  # a full frame by the TCP payload in it: the race's links carry payload
PORT: Final = 29500
DEADLINE_S: Final = 600.0
WITHIN: Final = 0.10


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rho", default="4,40")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--for-s", type=float, default=60.0)
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        network.refuse_without_tools()
        if unknown := set(options.methods.split(",")) - set(METHODS):
            raise BadInput(f"no method {min(unknown)!r} here; there are {', '.join(METHODS)}")
    except BadInput as error:
        print(f"race_lab: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    entries = Task(LAB, 0).entries
    print(f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}  load {os.getloadavg()[0]:.0f}")
    print(f"{entries / 1e6:.2f} M parameters, {ISLANDS} islands, a step without network {options.step_s:g} s")
    print("| method | rho | Mbit/s | steps | a step, as the race counts | in the laboratory | of it |\n|" + "---|" * 7)
    with network.Network(ISLANDS) as lab:
        for cell, (rho, name) in enumerate(
            (float(rho), name) for rho in options.rho.split(",") for name in options.methods.split(",")
        ):
            link = link_of(rho, entries, ISLANDS, options.step_s)
            exchanges = exchanged(name, MOST_STEPS)
            done = finished_s(exchanges, MOST_STEPS, [options.step_s] * ISLANDS, link)
            steps = max(LEAST_STEPS, sum(at_s <= options.for_s for at_s in done))
            counted = (done[steps - 1] - done[WARM_UP - 1]) / (steps - WARM_UP)
            asked = Asked(name, steps, options.step_s, DEADLINE_S, os.getpid())
            took = measured(lab, link, asked, [one for one in exchanges if one.after < steps], PORT + cell)
            off = took / counted - 1
            note = "" if abs(off) <= WITHIN else " **!**"
            print(
                f"| {name} | {rho:g} | {link.up_bps / 1e6:.2f} | {steps} | {counted:.3f} s | {took:.3f} s | "
                f"{off:+.1%}{note} |",
                flush=True,
            )
    return 0


def exchanged(name: str, steps: int) -> list[Exchange]:
    """What the race counts of so many steps."""
    task = Task(LAB, 0)
    replicas = [
        Replica(task, Batches(part, LAB, 0, island), 2e-3, steps)
        for island, part in enumerate(shards(LAB, "P1", ISLANDS, 0))
    ]
    method = FIELD[name].build(replicas, FIELD[name].settings[0])
    return [one for step in range(steps) for one in method.step(step)]


def measured(lab: network.Network, link: Link, asked: Asked, exchanges: Sequence[Exchange], port: int) -> float:
    """Seconds a step, of the slowest island. Raises SystemExit where an island fails."""
    lab.shape(None)
    workers = []
    for rank in range(ISLANDS):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ISLANDS), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.address(0), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": network.DEVICE, "TORCH_CPP_LOG_LEVEL": "ERROR", "ATOLL_ISLAND": f"island-{rank}",
        }  # fmt: skip
        argv = [sys.executable, str(network.SCRIPTS / "race_lab_train.py"), json.dumps(asdict(asked))]
        workers.append(
            subprocess.Popen(lab.inside(rank, argv), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    try:
        sent = json.dumps([asdict(one) for one in exchanges])
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                raise SystemExit(f"race_lab: an island of {asked.method} did not start; what it said stands above")
        lab.shape(FRAMED * link.up_bps / 1e6, BURST)
        told = []
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(sent + "\n")
            worker.stdin.flush()
        for worker in workers:
            out, _ = worker.communicate(timeout=DEADLINE_S)
            if worker.returncode:
                raise SystemExit(f"race_lab: an island of {asked.method} ended with {worker.returncode}")
            told.append(float(out))
        return max(told)
    finally:
        lab.shape(None)
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    sys.exit(main())
