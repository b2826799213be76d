"""Losses of three unequal workers against one worker with the whole batch, step by step.

    python benchmarks/equivalence.py [--steps 50]

The same script, seed and batches: once as a job on agents of speeds 1, 0.6 and 0.3 (shares change), once alone.
The loss of a step is the workers' losses weighted by their parts of the batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import SCRIPTS, Cluster

BATCH = 48


def losses(out: Path) -> dict[int, float]:
    together: dict[int, float] = {}
    for path in out.glob("run-*-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            together[line["step"]] = together.get(line["step"], 0.0) + line["weight"] * line["loss"]
    return together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        arguments = ("--epochs=1", f"--samples={steps * BATCH}", f"--batch-size={BATCH}", "--dropout=0")
        alone, job_out = Path(folder, "alone"), Path(folder, "job")
        command = [sys.executable, str(SCRIPTS / "tiny.py"), f"--out={alone}", *arguments, "--step-s=0"]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        cluster.local([1.0, 0.6, 0.3])
        job = cluster.submit("tiny.py", f"--out={job_out}", *arguments, "--step-s=0.15", workers=(3, 3))
        ended = cluster.wait_for_end(job, 180)
        one, three = losses(alone), losses(job_out)
        print(f"{ended.plan.id} plans, final shares {[round(worker.share, 3) for worker in ended.workers]}")
    assert sorted(one) == sorted(three) == list(range(steps)), "not the same steps"
    worst = max(abs(one[step] - three[step]) / abs(one[step]) for step in one)
    print(
        f"{steps} steps: loss {one[0]:.4f} -> {one[steps - 1]:.4f}; largest relative difference {worst:.2e} (goal 1e-5)"
    )


if __name__ == "__main__":
    main()
