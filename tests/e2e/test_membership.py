"""Changes of a run's members while it trains, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster, hurry, kill, kill_quietly
from test_failures import check_every_sample_once

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.common_pb2 import CheckpointPolicy


def changed_in_place(cluster: Cluster, job: str) -> common.Event | None:
    """Return the newest change in place."""
    found = [event for event in cluster.client.events(job) if event.kind == common.EVENT_KIND_CHANGED_IN_PLACE]
    return found[-1] if found else None


PARTS = ["noticed", "aborted", "told", "formed", "agreed", "first step"]


@pytest.mark.parametrize("strategy", ["dense", "stale-sparse"])
def test_the_survivors_of_a_killed_worker_keep_their_processes_and_every_sample_counts_once(
    strategy: str, trio: Cluster, tmp_path: Path
) -> None:
    """1. Three workers train; the one of rank 1 is killed (SIGKILL), with its agent, so that its device is gone. 2. The
    two others go on as the same processes, in the same run, in view 2; the job is RUNNING all the time, and nobody is
    started again. 3. The agent comes back: a worker joins them, in view 3. 4. All samples count once: those of the
    broken step as the two trained it; under stale-sparse those of all steps since the one that was whole in memory."""
    out = tmp_path / "out"
    policy = CheckpointPolicy(keep=3, memory_replicas=2)
    work = ("--epochs=1", "--samples=6000", "--step-s=0.2")
    job = trio.submit("tiny.py", f"--out={out}", *work, workers=(2, 3), checkpoint=policy, strategy=strategy)
    before = trio.wait_for(job, "a step in memory", lambda now: now.progress.step >= 20 and now.memory_step > 0)
    lost = next(worker for worker in before.workers if worker.rank == 1)
    pids = {worker.rank: worker.status.pid for worker in before.workers if worker.rank != 1}
    trio.kill(lost.node)
    kill_quietly(lost.status.pid)
    trio.wait_for(job, "the change in place", lambda _: changed_in_place(trio, job) is not None)
    now = trio.job(job)
    assert {worker.rank: worker.status.pid for worker in now.workers} == pids
    assert (now.phase, now.run) == (pb.PHASE_RUNNING, 1)
    told = changed_in_place(trio, job)
    assert told is not None
    assert (told.view, told.workers, [part.name for part in told.parts]) == (2, 2, PARTS)
    assert told.lost[0].startswith("rank 1 on ")
    trio.restart(lost.node)
    grown = trio.wait_for(job, "three workers again", lambda now: now.view == 3 and len(now.workers) == 3, 90)
    assert {worker.rank: worker.status.pid for worker in grown.workers if worker.rank != 3} == pids
    trio.wait_for_step(job, grown.progress.step + 10)
    hurry(out)
    end = trio.wait_for_end(job)
    assert (end.phase, end.run, end.restarts) == (pb.PHASE_DONE, 1, 0), trio.story(job)
    check_every_sample_once(out, samples=6000, epochs=1)


def test_a_killed_worker_is_replaced_in_place_and_no_bit_of_the_result_is_another(
    trio: Cluster, tmp_path: Path
) -> None:
    """1. Three workers of a job that needs three train; rank 1 is killed (SIGKILL). 2. The others stand still, in the
    same processes, until rank 3 has started in its stead and taken their state: view 2, of ranks 0, 3 and 2. 3. Nobody
    is started again; samples count once, and the weights are those of the same job undisturbed, bit by bit."""
    calm, out = tmp_path / "calm", tmp_path / "out"
    wanted = {"workers": (3, 3), "split": "even", "seed": 5, "checkpoint_every": 0}
    undisturbed = trio.submit("tiny.py", f"--out={calm}", "--epochs=6", "--step-s=0", **wanted)
    trio.wait_for_end(undisturbed)
    job = trio.submit("tiny.py", f"--out={out}", "--epochs=6", "--step-s=0.1", **wanted)
    before = trio.wait_for_step(job, 20)
    pids = {worker.rank: worker.status.pid for worker in before.workers}
    kill(pids.pop(1))
    trio.wait_for(job, "the change in place", lambda _: changed_in_place(trio, job) is not None, deadline_s=90)
    told = changed_in_place(trio, job)
    assert told is not None
    assert (told.view, told.workers, [part.name for part in told.parts]) == (2, 3, PARTS)
    assert told.lost[0].startswith("rank 1 on ")
    now = trio.job(job)
    ranks = [worker.rank for worker in now.workers]
    assert (now.phase, now.run, now.view, ranks) == (pb.PHASE_RUNNING, 1, 2, [0, 3, 2]), trio.story(job)
    assert {worker.rank: worker.status.pid for worker in now.workers if worker.rank != 3} == pids
    hurry(out)
    end = trio.wait_for_end(job)
    assert (end.phase, end.run, end.restarts) == (pb.PHASE_DONE, 1, 0), trio.story(job)
    check_every_sample_once(out, samples=600, epochs=6)
    assert (out / "final.json").read_text() == (calm / "final.json").read_text()


def test_a_device_that_makes_the_run_slower_leaves_in_place(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two workers train; a third machine comes and is taken in. 2. Each of its steps takes ten times as long: it is
    sent back, and is a standby with that reason. 3. The two others have trained on in the same processes; every sample
    counts once."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    work = ("--epochs=1000", "--ends-early", "--step-s=0.05", "--late-s=0.5")
    job = cluster.submit("tiny.py", f"--out={out}", *work, workers=(2, 3))
    before = cluster.wait_for_step(job, 20)
    pids = {worker.rank: worker.status.pid for worker in before.workers}
    cluster.agent("agent-2")
    cluster.wait_for(job, "the third is taken in", lambda now: len(now.workers) == 3, 90)
    after = cluster.wait_for(job, "it is sent back", lambda now: now.view >= 3 and len(now.workers) == 2, 90)
    assert {worker.rank: worker.status.pid for worker in after.workers} == pids
    cluster.wait_for_step(job, after.progress.step + 10)
    hurry(out)
    end = cluster.wait_for_end(job)
    assert (end.phase, end.run, end.restarts) == (pb.PHASE_DONE, 1, 0), cluster.story(job)
    assert [(one.node, one.device) for one in after.standby] == [("agent-2", 0)], cluster.story(job)
    check_every_sample_once(out, samples=600)
