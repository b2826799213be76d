"""Measures how long users wait: submit to first step, worker killed to training again, and what a controller restart
costs. And, simulated, what failures leave of the training time, by where checkpoints are kept.

    python benchmarks/recovery.py [cluster] [simulated] [--repeats 10]

Both parts where none is named. The cluster is a warm local one of two agents; times are read from what the workers
themselves write per step, not from telemetry. "Beyond importing torch" subtracts what two processes that import torch
and atoll at the same time take on this machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster, kill, wait_until
from lab.survival import simulated


def steps(out: Path, run: int) -> list[dict[str, float]]:
    lines = []
    for path in out.glob(f"run-{run}-rank-*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: line["at"])


def import_s() -> float:
    began = time.time()
    command = [sys.executable, "-c", "import torch, atoll, atoll.agent.runtime"]
    for process in [subprocess.Popen(command) for _ in range(2)]:
        process.wait(60)
    return time.time() - began


def submit_to_first_step(cluster: Cluster, folder: Path) -> float:
    out = Path(tempfile.mkdtemp(dir=folder))
    began = time.time()
    job = cluster.submit("tiny.py", f"--out={out}", "--epochs=1", "--step-s=0", workers=(2, 2))
    cluster.wait_for_end(job)
    return steps(out, 1)[0]["at"] - began


def killed_to_training(cluster: Cluster, folder: Path, rank: int) -> tuple[float, int]:
    """Seconds from the SIGKILL to the next run's first step, and the completed steps lost."""
    out = Path(tempfile.mkdtemp(dir=folder))
    job = cluster.submit("tiny.py", f"--out={out}", "--epochs=1000", workers=(2, 2), checkpoint_every=100_000)
    seen = cluster.wait_for_step(job, 30)
    killed = time.time()
    kill(seen.workers[rank].status.pid)
    return until_run_2(cluster, job, out, killed)


def until_run_2(cluster: Cluster, job: str, out: Path, killed_unix_s: float) -> tuple[float, int]:
    """Seconds to the first step of a killed job's next run, and the completed steps lost. The job ends here."""
    wait_until("run 2", lambda: steps(out, 2), 60)
    first = steps(out, 2)[0]
    last = max(line["step"] for line in steps(out, 1))
    cluster.client.cancel(job)
    cluster.wait_for_end(job)
    return first["at"] - killed_unix_s, max(0, int(last - first["step"]))


def controller_restart(cluster: Cluster, folder: Path) -> str:
    out = Path(tempfile.mkdtemp(dir=folder))
    job = cluster.submit("tiny.py", f"--out={out}", "--epochs=12", workers=(2, 2))
    cluster.wait_for_step(job, 30)
    cluster.kill("controller")
    killed = len(steps(out, 1))
    wait_until("training without a controller", lambda: len(steps(out, 1)) > killed + 200, 60)
    cluster.restart("controller")
    ended = cluster.wait_for_end(job, 120)
    seen = [line["step"] for line in steps(out, 1) if line["weight"]]
    gaps = [b["at"] - a["at"] for a, b in zip(steps(out, 1)[::2], steps(out, 1)[2::2], strict=False)]
    trained = len(set(seen))
    return (
        f"controller killed and restarted: run {ended.run}, {trained} of 600 steps trained, {len(seen) - 2 * trained} "
        f"trained again, longest pause between steps {max(gaps) * 1e3:.0f} ms "
        f"(median {statistics.median(gaps) * 1e3:.0f} ms)"
    )


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.2f} s [{ordered[0]:.2f}-{ordered[-1]:.2f}], n = {len(ordered)}"


def cluster(repeats: int) -> None:
    imports = [import_s() for _ in range(3)]
    print(f"importing torch and atoll in two processes at once: {spread(imports)}")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as local:
        local.local([1.0, 1.0])
        submit_to_first_step(local, Path(folder))
        first = [submit_to_first_step(local, Path(folder)) for _ in range(repeats)]
        print(f"submit to first step: {spread(first)}")
        print(f"  beyond importing torch: {statistics.median(first) - statistics.median(imports):.2f} s")
        killed = [killed_to_training(local, Path(folder), repeat % 2) for repeat in range(repeats)]
        print(f"worker killed to training again: {spread([took for took, _ in killed])}")
        print(f"  completed steps lost: {sorted(lost for _, lost in killed)}")
        print(controller_restart(local, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[[], "cluster", "simulated"], metavar="PART")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores")
    if "cluster" in (given.parts or ["cluster"]):
        cluster(given.repeats)
    if "simulated" in (given.parts or ["simulated"]):
        simulated()


if __name__ == "__main__":
    main()
