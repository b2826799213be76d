"""Measures how soon a strike is noticed, and how long training is interrupted, as a distribution over many strikes.

    python benchmarks/recovery_time.py [worker] [machine] [detection] [everyone] [--kills 30] [--step-s 0.1]

All four where none is named; `--kills 3` is a short run. A private cluster (three etcd members, two controllers, four
machines, a job of three workers) is struck only when it has trained 20 steps since the last strike and all machines
are there: so each kill is of a healthy cluster, and a standby is free. Times come from what the ranks write down, each
step before its exchange, and from the controllers' events. Steps wait in place of computing, so that processors are
free for the recovery itself; importing torch in three processes at once is most of it.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "tests")]

import torch
from drill import evidence, report, training
from drill.cluster import DrillCluster, fresh_folder
from drill.figures import Distribution, StrikeCost, recoveries
from drill.schedule import Hit, Planned, Strike
from drill.settings import Settings
from drill.strikes import Striker
from drill.watch import Watch
from lab.machine import processor

from atoll.client.client import AsyncClient

MACHINES = 4
WORKERS = 3
SETTLED_STEPS = 20
RECOVERED_S = 90.0
AWAY_S = 10.0


@dataclass(frozen=True)
class Part:
    """One line of the table."""

    what: str
    strike: Strike
    goal: str


PARTS = {
    "worker": Part("one worker killed", Strike.WORKER, "training ≤ 10 s"),
    "machine": Part("machine lost, standby free", Strike.MACHINE, "training ≤ 15 s"),
    "detection": Part("machine silent (SIGSTOP)", Strike.MACHINE_STOP, "noticed ≤ 3 s"),
    "everyone": Part("all workers killed", Strike.EVERYONE, "training ≤ 10 s"),
}


def newest(out: Path) -> tuple[int, int]:
    """(run, steps that rank 0 of it began)."""
    path = max(out.glob("run-*-rank-0000.jsonl"), default=None)
    return (int(path.name.split("-")[1]), path.read_text().count("\n")) if path is not None else (0, 0)


async def settled(client: AsyncClient, out: Path, after_run: int) -> int:
    """The run that trains, a newer one than `after_run`, when it has trained a while and all machines are there."""
    ends_s = time.monotonic() + RECOVERED_S
    while True:
        run, steps = newest(out)
        nodes = (await client.nodes()).nodes
        if run > after_run and steps >= SETTLED_STEPS and sum(node.connected for node in nodes) == MACHINES:
            return run
        if time.monotonic() > ends_s:
            raise SystemExit(f"not settled within {RECOVERED_S:g} s: run {run}, {steps} steps, {len(nodes)} nodes")
        await asyncio.sleep(0.1)


async def struck(part: Part, kills: int, step_s: float, folder: Path) -> list[StrikeCost]:
    settings = Settings(
        length_s=kills * RECOVERED_S, every_s=RECOVERED_S, seed=1, machines=MACHINES, workers=WORKERS, controllers=2,
        kinds=(), step_s=step_s,
    )  # fmt: skip
    out, draws, hits, run = folder / "out", random.Random(1), list[Hit](), 0
    with DrillCluster(folder) as cluster:
        cluster.start(settings.controllers, settings.machines)
        watch = Watch(cluster.addresses)
        async with AsyncClient(list(cluster.addresses.values()), timeout_s=60) as client:
            await training.ready(client, MACHINES)
            job = await training.submit(client, settings, out, checkpoints=True)
            following = asyncio.create_task(watch.follow(job))
            striker = Striker(cluster, lambda: None, step_s)
            for number in range(kills):
                run = await settled(client, out, run)
                planned = Planned(0.0, part.strike, draws.random(), AWAY_S, 0.0)
                print(f"  {part.what}: {number + 1} of {kills}, run {run}", file=sys.stderr, flush=True)
                hits += await striker.strike(planned)
            await settled(client, out, run)
            await client.cancel(job)
            await following
    return recoveries(evidence.read(out), [watch.noticed(hit) for hit in hits])


def import_s() -> float:
    """What importing torch and Atoll takes in as many processes at once as the job has workers."""
    began_s = time.monotonic()
    command = [sys.executable, "-c", "import torch, atoll, atoll.agent.runtime"]
    for process in [subprocess.Popen(command) for _ in range(WORKERS)]:
        process.wait(120)
    return time.monotonic() - began_s


def row(part: Part, found: list[StrikeCost]) -> list[str]:
    noticed = Distribution.of(one.detection_s for one in found if one.detection_s is not None)
    trained = Distribution.of(one.training_s for one in found if one.training_s is not None)
    lost = sorted(one.steps_lost for one in found)
    steps = f"{statistics.median(lost):g} / {lost[-1]}"
    return [part.what, str(len(found)), shown(noticed), shown(trained), steps, part.goal]


def shown(found: Distribution | None) -> str:
    return f"{found.median:.2f} / {found.p90:.2f} / {found.most:.2f}" if found else "-"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.1)
    given = parser.parse_args()
    rows = []
    for name in given.parts or PARTS:
        folder = fresh_folder()
        try:
            rows.append(row(PARTS[name], asyncio.run(struck(PARTS[name], given.kills, given.step_s, folder))))
        finally:
            shutil.rmtree(folder)
    imports = Distribution.of(import_s() for _ in range(3))
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(
        f"importing torch and Atoll in {WORKERS} processes at once: {shown(imports)} s. Median / p90 / most, seconds:\n"
    )
    print(report.markdown(("strike", "kills", "noticed after", "training after", "steps lost", "goal"), rows))


if __name__ == "__main__":
    main()
