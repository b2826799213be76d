"""Checkpoints in memory, through the whole system. Every kill is SIGKILL."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, alive, hurry, kill, kill_quietly, wait_until
from test_failures import check_every_sample_once

from atoll.agent.supervisor.memory import root_of
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.common_pb2 import CheckpointPolicy

SLOW = "--step-s=0.1"  # of which one percent is more than writing costs
SLOWER = "--step-s=0.3"  # there is time to strike before a short job's end


def memory_of(cluster: Cluster, agent: str, job: str) -> Path:
    return root_of(cluster.folder / agent) / job


def in_memory(cluster: Cluster, job: str, step: int) -> pb.Job:
    return cluster.wait_for(job, f"step {step} in memory", lambda j: j.memory_step >= step)


def resumed_at(cluster: Cluster, job: str, rank: int = 0) -> list[tuple[int, str]]:
    """What the rank said of it, waited for: a log comes a little after what it tells of."""

    def said() -> list[tuple[int, str]]:
        found = re.findall(r"resumes from step (\d+)(, from memory)?.*\n", cluster.log(job, rank))
        return [(int(step), where) for step, where in found]

    return wait_until(f"rank {rank} says from where it goes on", said, 90)


def first_step(out: Path, run: int, rank: int = 0) -> int:
    return int(json.loads((out / f"run-{run}-rank-{rank}.jsonl").read_text().splitlines()[0])["step"])


def last_step(out: Path, run: int, rank: int = 0) -> int:
    return int(json.loads((out / f"run-{run}-rank-{rank}.jsonl").read_text().splitlines()[-1])["step"])


def final(out: Path) -> list[float]:
    weights: list[float] = json.loads((out / "final.json").read_text())["weights"]
    return weights


def test_killed_worker_goes_on_from_its_agents_memory(cluster: Cluster, tmp_path: Path) -> None:
    """1. One worker, nothing on disk. 2. It is killed. 3. Run 2 begins at the step that was under way, or some before
    it where a busy machine keeps fewer. 4. Run 2 keeps generations too, newer ones. How new is for the machine, which
    keeps fewer where it is busy, and for the controller, which writes one a second. 5. It ends with the weights of a
    job that nobody disturbed, and its memory is given back."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    cluster.local([1.0])
    job = cluster.submit("tiny.py", f"--out={out}", SLOW, "--epochs=6", checkpoint_every=0)
    before = in_memory(cluster, job, 8)
    folder = memory_of(cluster, "agent-0", job)
    assert any(folder.iterdir())
    kill(before.workers[0].status.pid)
    ((step, where),) = resumed_at(cluster, job)
    assert where
    cluster.wait_for(
        job, "a generation of run 2", lambda j: j.run == 2 and j.memory_step > max(step, before.memory_step)
    )
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 2), cluster.story(job)
    assert before.memory_step <= step <= last_step(out, 1) + 1
    assert first_step(out, 2) == step
    check_every_sample_once(out, samples=600, epochs=6)
    wait_until("the job's memory is given back", lambda: not folder.exists(), 30)
    undisturbed = cluster.submit("tiny.py", f"--out={calm}", "--step-s=0", "--epochs=6", checkpoint_every=0)
    assert cluster.wait_for_end(undisturbed).phase == pb.PHASE_DONE
    assert final(out) == final(calm)
    cluster._stop(cluster.processes["agent-0"])
    assert not folder.parent.exists(), "an agent that ends on purpose leaves nothing in memory"


def test_lost_machine_with_its_memory_and_everything_goes_on_from_the_copies(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two machines, each in a rack of its own, keep copies of each other's state. 2. All workers are killed, and
    machine 1 with its agent and its memory; they stand still before, or rank 0 might notice the loss of rank 1 and
    write to the disk. 3. It comes back empty; its part comes from machine 0. Shares are even: on a busy machine
    measured ones differ from job to job, and with them the samples that dropout's masks fall on."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    cluster.controller()
    for name in ("agent-0", "agent-1"):
        cluster.agent(name, 1.0, "--rack", f"rack-of-{name}")
    cluster.wait_for_nodes(2)
    how: dict[str, Any] = {"workers": (2, 2), "checkpoint_every": 0, "split": "even"}
    job = cluster.submit("tiny.py", f"--out={out}", SLOWER, "--epochs=2", **how)
    before = in_memory(cluster, job, 8)
    reply = cluster.client.plans(job)
    assert reply.HasField("placement")
    placement = reply.placement
    racks = {machine["name"]: machine["rack"] for machine in json.loads(placement.input)["machines"]}
    assert racks == {name: f"lan-1/rack-of-{name}" for name in ("agent-0", "agent-1")}
    assert json.loads(placement.output)["holders"] == [[0, 1], [1, 0]]
    pids = {worker.node: worker.status.pid for worker in before.workers}
    for pid in pids.values():
        kill(pid, signal.SIGSTOP)
    cluster.kill("agent-1")
    kill_quietly(pids["agent-0"])  # its agent ends it, too, as it stands still
    wait_until("no worker is left", lambda: not any(alive(pid) for pid in pids.values()), 30)
    shutil.rmtree(memory_of(cluster, "agent-1", job))
    cluster.restart("agent-1")
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert ended.phase == pb.PHASE_DONE, cluster.story(job)
    assert ended.restarts == 0
    last = max(last_step(out, 1, rank) for rank in (0, 1))
    for rank in (0, 1):
        ((step, where),) = resumed_at(cluster, job, rank)
        assert where
        assert before.memory_step <= step <= last + 1
    check_every_sample_once(out, samples=600, epochs=2)
    undisturbed = cluster.submit("tiny.py", f"--out={calm}", "--step-s=0", "--epochs=2", **how)
    assert cluster.wait_for_end(undisturbed).phase == pb.PHASE_DONE
    assert final(out) == final(calm)


def test_stale_sparse_goes_on_from_memory_when_all_its_workers_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two workers, updates always under way, nothing on disk. 2. SIGKILL for both at once. 3. They go on from the
    memory of their agents, no earlier than the step last told to be there, and what they held back is missed by nobody.
    4. Each sample counts once."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    how: dict[str, Any] = {"strategy": "stale-sparse", "strategy_settings": '{"sparsity":0.9}', "checkpoint_every": 0}
    job = cluster.submit("tiny.py", f"--out={out}", SLOWER, "--epochs=1", workers=(2, 2), **how)
    before = in_memory(cluster, job, 8)
    for worker in before.workers:
        kill(worker.status.pid)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 2, 0), cluster.story(job)
    steps = {resumed_at(cluster, job, rank)[0] for rank in (0, 1)}
    assert len(steps) == 1
    ((step, where),) = steps
    assert where
    assert before.memory_step <= step <= last_step(out, 1) + 1
    assert "held back" not in cluster.story(job)
    check_every_sample_once(out, samples=600, epochs=1)


def test_a_machine_outside_of_the_new_run_serves_what_it_holds(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two of three machines train; each keeps its own part alone, nothing is on disk. 2. All workers are killed, and
    machine 1 comes back so slow that the third takes its place. 3. The new run lacks machine 1's part, which is waited
    for; its agent, which has no part in the run, serves it: the job goes on from memory."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    cluster.controller()
    for name, speed in (("agent-0", 1.0), ("agent-1", 1.0), ("agent-2", 0.5)):
        cluster.agent(name, speed)
    cluster.wait_for_nodes(3)
    alone: dict[str, Any] = {"split": "even", "checkpoint": CheckpointPolicy(memory_replicas=1)}
    job = cluster.submit("tiny.py", f"--out={out}", SLOWER, "--epochs=2", workers=(2, 2), **alone)
    before = in_memory(cluster, job, 8)
    assert {worker.node for worker in before.workers} == {"agent-0", "agent-1"}
    pids = {worker.node: worker.status.pid for worker in before.workers}
    for pid in pids.values():
        kill(pid, signal.SIGSTOP)
    cluster.kill("agent-1")
    kill_quietly(pids["agent-0"])
    wait_until("no worker is left", lambda: not any(alive(pid) for pid in pids.values()), 30)
    cluster.agent("agent-1", 0.05)
    run = before.run + 1  # 2, unless a busy machine kept an agent silent for longer than its lease
    again = cluster.wait_for(job, "the next run", lambda j: j.run == run and j.memory_step > before.memory_step)
    assert {worker.node for worker in again.workers} == {"agent-0", "agent-2"}, cluster.story(job)
    ((step, where),) = resumed_at(cluster, job)
    assert (step >= before.memory_step, where) == (True, ", from memory"), cluster.story(job)
    told = "come from the memory of agent-1, which has no part in this run"
    wait_until("that is told", lambda: told in cluster.story(job), 30)
    hurry(out)
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE
    check_every_sample_once(out, samples=600, epochs=2)
    undisturbed = cluster.submit("tiny.py", f"--out={calm}", "--step-s=0", "--epochs=2", workers=(2, 2), **alone)
    assert cluster.wait_for_end(undisturbed).phase == pb.PHASE_DONE
    assert final(out) == final(calm)


def test_killed_agent_leaves_its_jobs_memory_to_the_next_one_and_strangers_go(cluster: Cluster, tmp_path: Path) -> None:
    """1. An agent is killed with its worker. 2. In its folder lies also a job that nobody knows. 3. The next agent
    keeps what may come back, which does, and drops the other. 4. A cancelled job's memory is given back."""
    out = tmp_path / "out"
    cluster.local([1.0])
    job = cluster.submit("tiny.py", f"--out={out}", SLOW, "--epochs=100", checkpoint_every=0)
    in_memory(cluster, job, 5)
    cluster.kill("agent-0")
    stranger = memory_of(cluster, "agent-0", "tiny-unknown")
    stranger.mkdir()
    cluster.restart("agent-0")
    cluster.wait_for(job, "run 2 that trains", lambda j: j.run == 2 and j.memory_step > 8)
    ((step, where),) = resumed_at(cluster, job)
    assert (step >= 5, where) == (True, ", from memory")
    wait_until("the stranger's folder is gone", lambda: not stranger.exists(), 30)
    cluster.client.cancel(job)
    cluster.wait_for_end(job)
    wait_until("the job's memory is given back", lambda: not memory_of(cluster, "agent-0", job).exists(), 30)


def test_a_machine_whose_shared_memory_is_small_says_so_in_the_jobs_events(cluster: Cluster, tmp_path: Path) -> None:
    """1. As in many containers /dev/shm has 64 MB: here in a mount namespace of the agent's own. 2. An event of the job
    says how large it is, where the checkpoints are instead, and what to do. 3. Its worker is killed: the job goes on
    from there."""
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", small], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace may be made here: a small /dev/shm was NOT tried")
    cluster.controller()
    cluster.agent("agent-0")
    cluster.kill("agent-0")
    cluster.start("agent-0", ("unshare", "-m", "sh", "-c", f'{small} && exec "$@"', "sh", *cluster.commands["agent-0"]))
    cluster.wait_for_nodes(1)
    out = tmp_path / "out"
    job = cluster.submit("tiny.py", f"--out={out}", SLOWER, "--epochs=1", checkpoint_every=0)
    before = in_memory(cluster, job, 5)
    folder = cluster.folder / "agent-0" / "memory"
    told = f"/dev/shm has 67.1 MB, checkpoints in memory need 268.4 MB: they are files in {folder} instead"
    assert told in cluster.story(job)
    assert any((folder / job).iterdir())
    kill(before.workers[0].status.pid)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 2), cluster.story(job)
    ((step, where),) = resumed_at(cluster, job)
    assert (step >= 5, where) == (True, ", from memory")
