"""After the last step: the last checkpoint, what a script does then, and what may happen meanwhile."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster, alive, kill, wait_until
from test_failures import check_every_sample_once

from atoll.v1 import jobs_pb2 as pb

STEPS = 100  # of tiny.py: 2 epochs of 600 samples, 12 a step
QUICK = "--step-s=0"
SLOW_DISK = "--disk-s=2"  # for each of the nine pieces of a checkpoint: 18 s


def being_written(cluster: Cluster, job: str) -> bool:
    return any((cluster.folder / "jobs" / job).glob(".writing-*"))


def test_a_last_checkpoint_that_takes_its_time_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """1. All ranks have trained; the only checkpoint is the last one, of a disk that needs 18 s for it. 2. Rank 1 stays
    until it is there: it once ended at once, rank 0 was stopped 10 s later in the middle of saving, twice, and the job
    failed without a checkpoint. 3. Devices that are free by then are not taken in: there is no step for them."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    job = cluster.submit("tiny.py", f"--out={out}", QUICK, SLOW_DISK, workers=(2, 3), checkpoint_every=0)
    wait_until("the last checkpoint is being written", lambda: being_written(cluster, job), 90)
    cluster.agent("agent-2")
    cluster.wait_for(job, "all ranks say so", lambda j: [w.status.trained for w in j.workers] == [True, True], 16)
    assert not (out / "evaluating").exists()
    cluster.wait_for_nodes(3)  # which takes its time: what is looked at before lasts no longer than the disk does
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), cluster.story(job)
    assert ended.checkpoint_step == STEPS
    assert "all ranks wait until the last checkpoint is saved" in cluster.story(job)
    check_every_sample_once(out, samples=600, epochs=2)


def test_rank_0_killed_while_it_saves_the_last_checkpoint_is_finished_by_another(pair: Cluster, tmp_path: Path) -> None:
    """1. Rank 0 dies (SIGKILL) in the middle of the only checkpoint. 2. Rank 1 still has what training ended with, and
    writes it: 18 s, in which it is not killed, as its bytes move. 3. Run 2 has nothing left to train."""
    out = tmp_path / "out"
    job = pair.submit("tiny.py", f"--out={out}", QUICK, SLOW_DISK, workers=(2, 2), checkpoint_every=0)
    wait_until("the last checkpoint is being written", lambda: being_written(pair, job), 90)
    kill(pair.worker_pids(job)[0])
    ended = pair.wait_for_end(job, deadline_s=150)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 2, 0), pair.story(job)
    assert ended.checkpoint_step == STEPS
    pair.wait_for_output(job, f"resumes from step {STEPS}")
    assert ended.recovery.steps_lost == 0
    check_every_sample_once(out, samples=600, epochs=2)


def test_workers_that_save_are_not_stopped_in_the_middle_of_it(cluster: Cluster, tmp_path: Path) -> None:
    """1. A device joins: the run, whose script has a schedule of its own, stops to grow, and its only checkpoint takes
    18 s, of which it once got 12; nobody was told how many steps were lost with it. 2. The next run goes on from that
    step, and a sentence says so. 3. It is cancelled: the checkpoint takes 18 s again, of which it once got 4, and is
    there in the end."""
    out = tmp_path / "out"
    cluster.local([1.0])
    job = cluster.submit(
        "tiny.py", f"--out={out}", "--epochs=1000", SLOW_DISK, "--own-schedule", workers=(1, 2), checkpoint_every=0
    )
    cluster.wait_for_step(job, 10)
    cluster.agent("agent-1")
    grown = cluster.wait_for(job, "two workers that train", lambda j: j.run == 2 and j.recovery.resumed_unix_s > 0, 180)
    assert (grown.recovery.resize, grown.recovery.tier, grown.recovery.steps_lost) == (True, "disk", 0)
    assert grown.checkpoint_step == grown.recovery.step >= 10
    story = cluster.story(job)
    assert "resized in " in story
    assert f"; from disk, step {grown.recovery.step}, no steps lost; agent-1 joined" in story
    cluster.wait_for_step(job, grown.recovery.step + 20)
    cluster.client.cancel(job)
    ended = cluster.wait_for_end(job)
    assert ended.phase == pb.PHASE_CANCELLED
    assert ended.checkpoint_step >= grown.recovery.step + 20, cluster.story(job)


def test_rank_0_may_evaluate_for_long_while_the_others_have_ended(pair: Cluster, tmp_path: Path) -> None:
    """1. Rank 0 works for 15 s after training; rank 1 has ended. 2. Meanwhile the controller is killed: the next one
    hears again that all have trained. 3. Rank 1 once counted as one that left early, and the job failed."""
    out = tmp_path / "out"
    job = pair.submit("tiny.py", f"--out={out}", QUICK, "--evaluate-s=15", workers=(2, 2))
    wait_until("rank 0 evaluates", (out / "evaluating").exists, 90)
    pair.wait_for(job, "rank 1 has ended", lambda j: not j.workers[1].status.pid, 12)
    pair.kill("controller")
    pair.restart("controller")
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), pair.story(job)
    assert json.loads((out / "final.json").read_text())["step"] == STEPS


def test_an_evaluation_that_never_ends_is_stopped_with_hang_s_and_on_cancel(pair: Cluster, tmp_path: Path) -> None:
    """1. Rank 0 evaluates for ever. 2. With hang_s it is stopped, and the script is blamed; the model is on disk.
    3. Another such job, without hang_s, is cancelled at once."""
    arguments = (QUICK, "--evaluate-s=6000")
    hung = pair.submit("tiny.py", f"--out={tmp_path / 'a'}", *arguments, workers=(2, 2), hang_s=10.0, name="hung")
    ended = pair.wait_for_end(hung)
    assert ended.phase == pb.PHASE_FAILED, pair.story(hung)
    assert f"after step {STEPS} (hang_s = 10)" in ended.reason
    assert "no end for" in ended.reason
    assert ended.checkpoint_step == STEPS
    job = pair.submit("tiny.py", f"--out={tmp_path / 'b'}", *arguments, workers=(2, 2))
    wait_until("rank 0 evaluates", (tmp_path / "b" / "evaluating").exists, 90)
    pids = pair.worker_pids(job)
    pair.client.cancel(job)
    ended = pair.wait_for_end(job, deadline_s=30)
    assert (ended.phase, ended.checkpoint_step) == (pb.PHASE_CANCELLED, STEPS), pair.story(job)
    assert not any(pid and alive(pid) for pid in pids)


def test_full_disk_at_the_last_checkpoint_is_told_and_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """1. Every checkpoint meets a full disk: an event, and training goes on. 2. The last one too: all ranks wait, and
    it is tried again. 3. Somebody makes room: the job is done, and its model is there. It once was done without."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        cluster.local([1.0])
        job = cluster.submit("tiny.py", f"--out={tmp_path / 'out'}", checkpoint_directory=str(disk))
        wait_until("the last one cannot be written", lambda: "It is tried again" in cluster.story(job), 90)
        story = cluster.story(job)
        assert "No space left" in story
        assert str(disk) in story
        assert "training continues" in story
        assert cluster.job(job).checkpoint_step == 0
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        ended = cluster.wait_for_end(job)
        assert (ended.phase, ended.checkpoint_step) == (pb.PHASE_DONE, STEPS), cluster.story(job)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
