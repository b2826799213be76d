"""Recoveries as they are told and recorded, through the whole system."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from cluster import Cluster, hurry, kill
from test_failures import check_every_sample_once
from test_memory import SLOW, SLOWER, in_memory, memory_of

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def recovered(cluster: Cluster, job: str, run: int) -> pb.Job:
    """The job once its run `run` has trained."""
    found = cluster.wait_for(job, f"run {run} trains", lambda j: j.run == run and j.recovery.resumed_unix_s > 0)
    seen = found.recovery
    times = [seen.seen_unix_s, seen.detected_unix_s, seen.ended_unix_s, seen.launched_unix_s, seen.resumed_unix_s]
    assert times == sorted(times)
    events = cluster.client.events(job)
    (told,) = (one for one in events if one.kind == common.EVENT_KIND_RECOVERED and one.run == run)
    names = [part.name for part in told.parts if part.name != "waiting for devices"]
    assert (names, told.step) == (["detecting", "ending", "starting"], seen.step), told.text
    assert told.tier in ("memory", "disk")
    return found


def test_a_lost_machine_is_replaced_by_the_standby_at_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two machines train, a third is kept free: another job does not get it. 2. Machine 0 vanishes with its memory.
    3. The third takes its place, in the same run, with the state of machine 1, whose worker stood still for it. Before,
    what was kept for the job was not offered to a run while another job waited."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0, 1.0])
    job = cluster.submit("tiny.py", f"--out={out}", SLOW, "--epochs=50", workers=(2, 2), standby=1, checkpoint_every=0)
    before = in_memory(cluster, job, 4)
    ranks = {worker.rank: worker.node for worker in before.workers}
    ((spare, reason),) = ((s.node, s.reason) for s in before.standby)
    assert (spare in ranks.values(), reason) == (False, "kept to take over a lost one")
    other = cluster.submit("tiny.py", f"--out={tmp_path / 'other'}", "--epochs=1", name="other")
    cluster.wait_for(other, "its reason", lambda j: "0 free, at least 1 needed" in j.reason)
    cluster.kill(ranks[0])
    shutil.rmtree(memory_of(cluster, ranks[0], job), ignore_errors=True)
    found = cluster.wait_for(job, "view 2 trains", lambda j: j.view == 2 and j.progress.step > before.progress.step + 5)
    assert (found.run, [worker.node for worker in found.workers]) == (1, [spare, ranks[1]]), cluster.story(job)
    told = f"rank 0 on {ranks[0]} lost; rank 2 on {spare} joined"
    cluster.wait_for(job, "that is told", lambda _: told in cluster.story(job))
    cluster.restart(ranks[0])
    cluster.wait_for(job, "the next standby", lambda j: [s.node for s in j.standby] == [ranks[0]])
    assert cluster.job(other).phase == pb.PHASE_QUEUED


def test_a_recovery_goes_on_when_the_leading_controller_dies_in_the_middle(cluster: Cluster, tmp_path: Path) -> None:
    """1. Both workers are killed; nothing is on disk. 2. As the next run starts, its controller is killed. 3. The other
    one finishes the recovery that it finds, and what was complete in memory is still known."""
    out = tmp_path / "out"
    cluster.led_by_one_of_two()
    job = cluster.submit("tiny.py", f"--out={out}", SLOWER, "--epochs=2", workers=(2, 2), checkpoint_every=0)
    cluster.client.close()
    cluster._client = None  # a client that knows both controllers
    before = in_memory(cluster, job, 4)
    for pid in cluster.worker_pids(job):
        kill(pid)
    cluster.wait_for(job, "run 2", lambda j: j.run == 2)
    cluster.kill("controller-a")
    found = recovered(cluster, job, 2)
    assert cluster.client.nodes().controller == cluster.addresses[1]
    assert (found.recovery.run, found.recovery.tier) == (1, "memory")
    assert found.recovery.step >= before.memory_step
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 2), cluster.story(job)
    check_every_sample_once(out, samples=600, epochs=2)


def test_a_machine_that_says_nothing_any_more_is_lost_though_its_connection_stands(
    cluster: Cluster, tmp_path: Path
) -> None:
    """1. An agent is stopped (SIGSTOP): no reset, no goodbye, its worker trains on. The run goes on without it, in view
    2. 2. It comes back: its worker, which missed that, is stopped, and another one there joins the run."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    work = ("--step-s=0.002", "--sample-s=0.008")  # of which two machines do half each
    job = cluster.submit("tiny.py", f"--out={out}", *work, "--epochs=50", workers=(1, 2))
    cluster.wait_for(job, "two workers that train", lambda j: len(j.workers) == 2 and j.progress.step >= 4)
    cluster.kill("agent-1", signal.SIGSTOP)
    found = cluster.wait_for(job, "view 2", lambda j: j.view == 2 and len(j.workers) == 1)
    assert (found.run, found.workers[0].node) == (1, "agent-0")
    cluster.wait_for_step(job, found.progress.step + 5)
    cluster.kill("agent-1", signal.SIGCONT)
    cluster.wait_for(job, "the machine is taken in again", lambda j: j.view == 3 and len(j.workers) == 2)
    assert (cluster.job(job).run, cluster.job(job).restarts) == (1, 0), cluster.story(job)
