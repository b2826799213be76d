"""Jobs of strategy volunteer with a model in stages, on a real cluster: volunteers help stages, are killed, and lie."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, hurry, kill, wait_until
from fork_servers import wait_for_fork_servers
from test_volunteers import alone, each_sample_counted_once, helped, helpers, losses, told, volunteers  # noqa: F401

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

STAGES = '{"stages":2}'


def helped_ranks(job: pb.Job) -> list[int]:
    """By volunteer that has answered."""
    return sorted(worker.rank for worker in job.workers for link in worker.links if link.volunteer)


def trains(cluster: Cluster, job: str, run: int) -> dict[int, int]:
    """Pids by rank, once this run has both."""

    def there(seen: pb.Job) -> bool:
        running = [one for one in seen.workers if one.status.state == common.WORKER_STATE_RUNNING]
        return seen.run == run and seen.phase == pb.PHASE_RUNNING and len(running) == 2

    return {one.rank: one.status.pid for one in cluster.wait_for(job, f"run {run}", there).workers}


def test_volunteers_help_both_stages_are_killed_and_vanish_and_each_sample_counts_once_in_each_stage(
    cluster: Cluster,
    tmp_path: Path,
    alone: dict[int, float],  # noqa: F811
) -> None:
    """1. Two nodes hold a stage each, and two volunteers come: one for each stage. 2. A helper gets SIGKILL: what it
    made is made again, by who is there. 3. All vanish: the servers go on by themselves. 4. The losses of every step
    are those of one process with the whole model."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    for name in ("friend-1", "friend-2"):
        cluster.agent(name, 1.0, "--volunteer")
    cluster.wait_for_nodes(4)
    job = helped(cluster, out, "--sample-s=0.03", workers=(2, 2), strategy_settings=STAGES)
    cluster.wait_for(job, "a volunteer for each stage", lambda j: helped_ranks(j) == [0, 1])
    assert re.search(r"volunteer friend-\d/0 of rank [01]: ", told(cluster, "status", job))
    killed = wait_until("its helper", lambda: helpers(cluster, "friend-1"), 30)[0]
    kill(killed.pid)
    wait_until("another helper", lambda: any(one.pid != killed.pid for one in helpers(cluster, "friend-1")), 90)
    cluster.wait_for(job, "two volunteers again", lambda j: volunteers(j) == 2)
    for name in ("friend-1", "friend-2"):
        cluster.kill(name)
    there = cluster.wait_for(job, "none left", lambda j: volunteers(j) == 0)
    assert there.progress.strategy_metrics["answered"] > 0
    assert there.progress.strategy_metrics["per_power"] > 0
    cluster.wait_for_step(job, there.progress.step + 2)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), cluster.story(job)
    assert losses(out) == losses(out, rank=1)
    each_sample_counted_once(losses(out), alone)
    assert losses(out) == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_servers_are_killed_one_after_the_other_and_nobody_imports_anything(
    cluster: Cluster,
    tmp_path: Path,
    alone: dict[int, float],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. Two nodes hold a stage each, which nobody else has. 2. The server of the first gets SIGKILL: all start again
    from the disk. 3. As soon as another step is done, that of the second does; it was 17 to 20 s until the run went on,
    for the first start had used up the processes that wait. 4. All four workers are forks of those, the same as before.
    5. Every step has every sample once, in each stage."""
    out = tmp_path / "out"
    monkeypatch.setattr(Cluster, "stock", None)  # the agents' processes import what users' do
    cluster.controller(etcd=cluster.etcd())
    for name in ("agent-0", "agent-1"):
        cluster.agent(name)
    cluster.wait_for_nodes(2)
    wait_for_fork_servers(cluster.folder, 2)
    servers = sorted(cluster.folder.glob("agent-*/pids/spare-*.pid"))
    job = helped(cluster, out, workers=(2, 2), strategy_settings=STAGES, checkpoint_every=1)
    cluster.wait_for_step(job, 3)
    for run, rank in ((1, 0), (2, 1)):
        workers = trains(cluster, job, run)
        assert all("warm_start.py" in " ".join(psutil.Process(pid).cmdline()) for pid in workers.values())
        kill(workers[rank])
        trains(cluster, job, run + 1)
        cluster.wait_for_step(job, max(losses(out)) + 2)
    assert sorted(cluster.folder.glob("agent-*/pids/spare-*.pid")) == servers
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 3), cluster.story(job)
    assert losses(out) == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_a_volunteer_of_a_stage_that_lies_is_shut_out_and_both_stages_begin_the_step_again(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: dict[int, float],  # noqa: F811
) -> None:
    """1. A volunteer is honest for ten passes, then has noise. 2. It is shut out, with the reason. 3. The job ends with
    all its steps."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    monkeypatch.setenv("HELPED_LIES", "10")
    cluster.agent("liar", 1.0, "--volunteer")
    cluster.wait_for_nodes(3)
    job = helped(cluster, out, workers=(2, 2), strategy_settings=STAGES)
    verdict = re.compile(r"liar/0 is shut out: 2 of its (\d+) answers differ")
    wait_until("the verdict", lambda: verdict.search(cluster.story(job)), 90)
    (answers,) = verdict.findall(cluster.story(job))
    assert int(answers) <= 2 * 10 + 50
    hurry(out)
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE, cluster.story(job)
    assert losses(out).keys() == alone.keys()
