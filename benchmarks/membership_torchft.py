"""The same kill as in membership.py, of torchft: one of three replica groups (SIGKILL), and how long the others stand
still.

    pip install torchft-nightly && python benchmarks/membership_torchft.py [--kills 10] [--times library]

Each kill is of three new processes, a replica group each (DistributedDataParallel on gloo, at least two replicas), with
the model and the steps of membership.py; the lighthouse is in this process. Seconds from the signal until both
survivors have completed the first step without the killed one, by the wall clock of one machine.

  command  the lighthouse's times are those that the command torchft_lighthouse has by default
  library  those that the class LighthouseServer has by default; a collective has 60 s, as everywhere in torchft
  tuned    half of that join timeout, a tenth of the quorum's tick, and 1 s for a collective. Who asks for a step's
           quorum later than the first by the join timeout is left out of it, alive or not
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "scripts")]

from lab.machine import processor

GROUPS = 3
TRAINS_AT = 20
DEADLINE_S = 90.0  # torchft's own, for a collective as for a quorum, is 60 s
FORKS = multiprocessing.get_context("forkserver")  # so that torch is imported once for all kills


class Times(NamedTuple):
    collective_s: float
    lighthouse: Mapping[str, int]


TIMES = {
    "command": Times(60.0, {"join_timeout_ms": 60_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5_000}),
    "library": Times(60.0, {}),
    "tuned": Times(1.0, {"join_timeout_ms": 50, "quorum_tick_ms": 10}),
}


class Begun(NamedTuple):
    """A step as it begins: `step` are committed, and the last that was tried had so many replicas."""

    step: int
    replicas: int
    unix_s: float


class Kill(NamedTuple):
    took_s: float
    vain: int
    """Steps that a survivor tried and did not commit."""
    left_out: int
    """Steps before the kill from which one of three that lived was left out."""


def begun(path: Path) -> list[Begun]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be half written
    return [Begun(int(step), int(replicas), float(unix_s)) for step, replicas, unix_s in map(str.split, lines)]


def trains(path: Path) -> bool:
    """Whether it is one of three, and has been for a while."""
    steps = begun(path)
    return sum(one.replicas == GROUPS for one in steps) >= TRAINS_AT and steps[-1].replicas == GROUPS


def went_on(path: Path, killed_s: float) -> Kill | None:
    """What the kill cost this survivor. None while it has committed no step without the killed one."""
    steps = begun(path)
    together = next(at for at, one in enumerate(steps) if one.replicas == GROUPS)
    left_out = sum(one.replicas < GROUPS for one in steps[together:] if one.unix_s < killed_s)
    vain = 0
    for before, after in pairwise(steps):
        if after.unix_s > killed_s and after.step == before.step:
            vain += 1
        elif after.unix_s > killed_s and after.replicas < GROUPS:
            return Kill(after.unix_s - killed_s, vain, left_out)
    return None


def wait_for(what: str, seen: Callable[[], bool], workers: list[ForkServerProcess], folder: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not seen():
        ended = [worker for worker in workers if worker.exitcode not in {None, -signal.SIGKILL}]
        if ended or time.monotonic() > deadline_s:
            said = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"membership_torchft: waited in vain for {what}:\n{said}")
        time.sleep(0.01)


def kill_one(folder: Path, victim: int, address: str, step_s: float, collective_s: float) -> Kill:
    """What it costs the others that one of three new processes is killed."""
    from membership_torchft_train import train

    paths = [folder / str(group) for group in range(GROUPS)]
    workers: list[ForkServerProcess] = []
    try:
        for group in range(GROUPS):
            worker = FORKS.Process(target=train, args=(folder, group, address, step_s, collective_s))
            worker.start()
            workers.append(worker)
        wait_for("three that train", lambda: all(map(trains, paths)), workers, folder)
        time.sleep(random.uniform(0, step_s))  # they were seen to begin a step: the kill is at any moment of one
        killed_s = time.time()
        workers[victim].kill()
        survivors = paths[:victim] + paths[victim + 1 :]
        wait_for("two that go on", lambda: all(went_on(path, killed_s) for path in survivors), workers, folder)
        kills = [kill for path in survivors if (kill := went_on(path, killed_s))]
        return Kill(*(max(each) for each in zip(*kills, strict=True)))
    finally:
        for worker in workers:
            worker.kill()  # nothing where it has ended
        for worker in workers:
            worker.join(10)


def measured(victim: int, step_s: float, times: Times) -> Kill:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", GROUPS - 1, **times.lighthouse)
    try:
        with tempfile.TemporaryDirectory() as folder:
            port = server.address().rpartition(":")[2]
            return kill_one(Path(folder), victim, f"http://127.0.0.1:{port}", step_s, times.collective_s)
    finally:
        server.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--times", choices=TIMES, default="library")
    given = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        print("membership_torchft: torchft is not here; pip install torchft-nightly", file=sys.stderr)
        return 2
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RUST_LOG="warn")
    FORKS.set_forkserver_preload(["torchft", "torch._dynamo", "torch.distributed.tensor"])  # DDP imports the latter
    times = TIMES[given.times]
    kills: list[Kill] = []
    for number in range(given.kills):
        kills.append(measured(number % GROUPS, given.step_s, times))
        print(f"  {number + 1} of {given.kills}: {kills[-1]}", file=sys.stderr, flush=True)
    took_s, vain, left_out = zip(*kills, strict=True)
    (torchft,) = metadata.packages_distributions()["torchft"]
    print(
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, "
        f"torch {metadata.version('torch')}, {torchft} {metadata.version(torchft)}, gloo"
    )
    print(
        f"{given.times}, {len(kills)} kills, steps of {given.step_s} s: median {statistics.median(took_s):.2f} s, "
        f"most {max(took_s):.2f} s; {sum(one_s > times.collective_s for one_s in took_s)} waited until a collective "
        f"timed out; tried in vain: median {statistics.median(vain):g} steps, most {max(vain)}; steps before the kill "
        f"that left out one that lived: {sum(left_out)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
