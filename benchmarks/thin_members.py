"""Measures what a change of members costs over thin links: one is killed, one joins, an island is left out.

    sudo env PATH=$PATH python benchmarks/thin_members.py [--mbit 50] [--cases killed,thin] [--seconds 200]

Controller, etcd and three agents in three network namespaces, an island each. The MLP of the laboratory (25.3 M
parameters, AdamW, 64 samples a worker) trains under `local-steps`, first over links of 300 Mbit/s. `killed`: all links
fall to --mbit; a minute later the last island's worker gets SIGKILL, the others go on, and one that starts in its stead
joins them. `thin`: the last island's link alone falls to --mbit, and the controller leaves it out where that is sooner.
Prints events of the run's members, and how long nobody completed a step after each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from lab.machine import processor
from lab.network import Network, refuse_without_tools
from loop_wan import PATHS, cli, cluster

ISLANDS = 3
WIDE_MBIT = 300.0
WIDE_S, THIN_S = 25.0, 60.0
STANDS_S = 3.0
"""A time without a step is told from here on."""


def submitted(network: Network, out: Path) -> str:
    """A job that trains, and has completed its first step."""
    script = [str(HERE / "scripts" / "follow_train.py"), "--workers", f"1:{ISLANDS}", "--env", f"PYTHONPATH={PATHS}"]
    script += ["--env", "OMP_NUM_THREADS=1", "--strategy", "local-steps", "--json", "--", "mlp", str(out)]
    job: str = json.loads(cli(network, "submit", *script))["job"]
    ends_s = time.monotonic() + 90
    while not (out.exists() and out.read_text()):
        if time.monotonic() > ends_s:
            raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
        time.sleep(0.2)
    return job


def step_of(network: Network, job: str) -> int:
    return int(json.loads(cli(network, "status", job, "--json"))["progress"]["step"])


def watch(network: Network, job: str, seconds: float) -> None:
    """Times in which no step was completed."""
    step, since_s, ends_s = step_of(network, job), time.monotonic(), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        time.sleep(0.5)
        now = step_of(network, job)
        if now == step:
            continue
        if (stood_s := time.monotonic() - since_s) > STANDS_S:
            print(f"    no step for {stood_s:.1f} s after step {step}, then step {now}", flush=True)
        step, since_s = now, time.monotonic()
    print(f"    step {step} at the end, {time.monotonic() - since_s:.1f} s old", flush=True)


def kill_the_last(network: Network, job: str) -> None:
    workers = json.loads(cli(network, "status", job, "--json"))["workers"]
    os.kill(workers[-1]["status"]["pid"], signal.SIGKILL)
    print(f"    SIGKILL for rank {workers[-1]['rank']}", flush=True)


def killed(network: Network, job: str, mbit: float, seconds: float) -> None:
    network.shape(mbit)
    print(f"    all links at {mbit:g} Mbit/s", flush=True)
    watch(network, job, THIN_S)
    kill_the_last(network, job)
    watch(network, job, seconds)


def thin(network: Network, job: str, mbit: float, seconds: float) -> None:
    network.shape(mbit, worker=ISLANDS - 1)
    print(f"    the last island's link at {mbit:g} Mbit/s", flush=True)
    watch(network, job, THIN_S + seconds)


CASES: dict[str, Callable[[Network, str, float, float], None]] = {"killed": killed, "thin": thin}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=float, default=50)
    parser.add_argument("--cases", default="killed,thin")
    parser.add_argument("--seconds", type=float, default=200, help="that each case is watched for in the end")
    options = parser.parse_args()
    refuse_without_tools()
    print(f"{datetime.date.today()}  {processor()}, {options.mbit:g} Mbit/s")
    for case in options.cases.split(","):
        print(f"{case}:", flush=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            Network(ISLANDS) as network,
            cluster(network, Path(folder)),
        ):
            network.shape(WIDE_MBIT)
            job = submitted(network, Path(folder) / "steps.jsonl")
            time.sleep(WIDE_S)
            CASES[case](network, job, options.mbit, options.seconds)
            kinds = (" membership ", " admission ", " worker ", " notice ")
            print("\n".join(line for line in cli(network, "events", job).splitlines() if any(k in line for k in kinds)))


if __name__ == "__main__":
    main()
