"""The loop over real processes: what is measured becomes plans, users pin and unpin, and no sample is lost by it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from cluster import Cluster, hurry, trained_samples

from atoll.v1 import jobs_pb2 as pb

SAMPLES, EPOCHS = 3000, 16


def atoll(*arguments: str, given: str | None = None) -> str:
    command = [sys.executable, "-m", "atoll.cli.main", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_batches_follow_the_speeds_and_the_user_and_every_sample_counts_once(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two workers, one at 0.4 of the other's speed, pinned to even shares. 2. Unpinned: the plans that follow give
    the slower one less. 3. The total batch is pinned to another. 4. Every plan comes out of its input again. 5. The
    job's end: each sample was trained once per epoch."""
    out = tmp_path / "out"
    cluster.local([1.0, 0.4])
    job = cluster.submit(
        "tiny.py", f"--out={out}", f"--epochs={EPOCHS}", "--batch-size=40", f"--samples={SAMPLES}", "--step-s=0.002",
        "--sample-s=0.0015", workers=(2, 2),
    )  # fmt: skip
    cluster.wait_for_step(job, 1)
    cluster.client.adjust(job, shares=[1.0, 1.0])
    even = cluster.wait_for(job, "even batches", lambda j: [w.last.local_batch for w in j.workers] == [20, 20])
    assert list(even.pins.shares) == [1.0, 1.0]
    cluster.wait_for_step(job, even.progress.step + 10)
    assert cluster.job(job).plan.id == even.plan.id

    cluster.client.adjust(job, unpin=["shares"])
    uneven = cluster.wait_for(  # the first one follows steps that others on the machine may have slowed down
        job,
        "a plan of its own",
        lambda j: j.plan.id > even.plan.id and j.workers[0].share > 1.3 * j.workers[1].share,
    )
    assert uneven.plan.planner in ("inverse-time", "optperf")
    assert uneven.plan.predicted_step_s > 0

    cluster.client.adjust(job, total_batch=60)
    larger = cluster.wait_for(job, "batches of 60", lambda j: {w.last.total_batch for w in j.workers} == {60})
    assert larger.pins.total_batch == 60

    hurry(out)
    ended = cluster.wait_for_end(job, deadline_s=180)
    assert ended.phase == pb.PHASE_DONE, cluster.story(job)
    controller = ("--controller", cluster.addresses[0])
    decided = cluster.client.plans(job).plans
    for plan in decided[-2:]:
        text = atoll(*controller, "plans", job, "--input", str(plan.plan.id))
        assert atoll("decide", plan.plan.planner, given=text).strip() == plan.output
    for epoch, counted in epochs_of(out).items():
        assert counted == Counter(range(SAMPLES)), f"epoch {epoch}"


def epochs_of(out: Path) -> dict[int, Counter[int]]:
    return {epoch: Counter(i for ids in steps.values() for i in ids) for epoch, steps in trained_samples(out).items()}
