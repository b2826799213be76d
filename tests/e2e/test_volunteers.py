"""Jobs of strategy volunteer: real controller, agents that stay, volunteers that are killed and lie."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import SCRIPTS, Cluster, hurry, kill, wait_until

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

STEPS = 150


def losses(out: Path, rank: int = 0) -> dict[int, float]:
    """By step, as it was trained first: a run that goes on at an epoch's end shows its last batch again, without
    effect. A step that a loss broke off is shown with 0."""
    whole = (out / f"rank-{rank}.jsonl").read_text().rpartition("\n")[0]  # a line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: line["loss"] for line in reversed(lines) if line["loss"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, forked_daemons: None) -> dict[int, float]:
    """The losses of one process by itself, without controller and volunteers."""
    out = tmp_path_factory.mktemp("alone")
    command = ("", str(SCRIPTS / "helped.py"), f"--out={out}", "--sample-s=0")
    assert Cluster.stock is not None
    assert Cluster.stock.start(command, os.environ).wait(120) == 0
    return losses(out)


def each_sample_counted_once(found: dict[int, float], alone: dict[int, float]) -> None:
    """One sample too many or too few in any step would move the losses of all later ones by more than rounding."""
    assert found.keys() == alone.keys() == set(range(STEPS))
    assert found == pytest.approx(alone, rel=1e-3, abs=1e-6)


def helpers(cluster: Cluster, node: str) -> list[common.WorkerStatus]:
    """Those that live on a volunteer's node."""
    (found,) = (one for one in cluster.client.nodes().nodes if one.name == node)
    return [one for one in found.workers if one.state == common.WORKER_STATE_RUNNING and one.uses_atoll]


def helped(cluster: Cluster, out: Path, *arguments: str, **fields: Any) -> str:
    return cluster.submit("helped.py", f"--out={out}", *arguments, strategy="volunteer", **fields)


def volunteers(job: pb.Job) -> float:
    return job.progress.strategy_metrics.get("volunteers", 0.0)


def told(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "atoll.cli.main", "--controller", cluster.addresses[0], *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_volunteers_help_are_killed_come_back_and_vanish_and_each_sample_counts_once(
    cluster: Cluster, tmp_path: Path, alone: dict[int, float]
) -> None:
    """1. One node stays, two are volunteers, which are never ranks: a job of two workers has no place. 2. Both help. 3.
    One helper gets SIGKILL; its agent starts another. 4. The owner of one needs it for a while. 5. Both
    agents get SIGKILL: the job trains on by itself. 6. Every step has every sample once."""
    out = tmp_path / "out"
    cluster.local([1.0])
    owned = (f"--pause=test -e {tmp_path / 'owner'}", "--hours=00:00-24:00", "--uplink-mbps=100")
    cluster.agent("friend-1", 1.0, "--volunteer")
    cluster.agent("friend-2", 1.0, "--volunteer", *owned)
    cluster.wait_for_nodes(3)
    waits = cluster.submit("tiny.py", f"--out={tmp_path / 'waits'}", workers=(2, 2))
    cluster.wait_for(waits, "its reason", lambda j: j.phase == pb.PHASE_QUEUED and "1 free" in j.reason)
    cluster.client.cancel(waits)
    job = helped(cluster, out, "--sample-s=0.06")
    cluster.wait_for(job, "two volunteers", lambda j: volunteers(j) == 2)
    shown = told(cluster, "nodes")
    assert "volunteer" in shown
    assert f"helps {job}" in shown
    killed = wait_until("its helper", lambda: helpers(cluster, "friend-1"), 30)[0]
    kill(killed.pid)
    wait_until("another helper", lambda: any(one.pid != killed.pid for one in helpers(cluster, "friend-1")), 90)
    cluster.wait_for(job, "its tasks back in the pool", lambda j: j.progress.strategy_metrics["returned"] >= 1)
    cluster.wait_for(job, "two volunteers again", lambda j: volunteers(j) == 2)
    (tmp_path / "owner").touch()
    cluster.wait_for(job, "the owner's machine to rest", lambda j: volunteers(j) == 1)
    (tmp_path / "owner").unlink()
    cluster.wait_for(job, "it to help again", lambda j: volunteers(j) == 2)
    cluster.kill("friend-1")
    cluster.kill("friend-2")
    there = cluster.wait_for(job, "none left", lambda j: volunteers(j) == 0)
    assert there.progress.strategy_metrics["answered"] > 0
    cluster.wait_for_step(job, there.progress.step + 2)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), cluster.story(job)
    assert "tasks answered" in told(cluster, "status", job)
    each_sample_counted_once(losses(out), alone)


@pytest.mark.parametrize("honest", [0, 10])
def test_a_volunteer_that_lies_is_shut_out_with_the_reason(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, float], honest: int
) -> None:
    """1. Of two volunteers one gives noise for gradients, at once or after honest answers. 2. It is shut out within 50
    of them, and events say why. 3. The other goes on, and the job ends with all its steps. Losses are as if nobody had
    lied where it did so from the beginning; later, lies that nobody compared have counted."""
    out = tmp_path / "out"
    cluster.local([1.0])
    cluster.agent("honest", 1.0, "--volunteer")
    monkeypatch.setenv("HELPED_LIES", str(honest))
    cluster.agent("liar", 1.0, "--volunteer")
    cluster.wait_for_nodes(3)
    job = helped(cluster, out)
    verdict = re.compile(r"liar/0 is shut out: 2 of its (\d+) answers differ")
    wait_until("the verdict", lambda: verdict.search(cluster.story(job)), 90)
    (answers,) = verdict.findall(cluster.story(job))
    assert int(answers) <= honest + 50
    assert "honest/0 is shut out" not in cluster.story(job)
    cluster.wait_for(job, "the honest one", lambda j: volunteers(j) == 1)
    hurry(out)
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE, cluster.story(job)
    if honest == 0:
        each_sample_counted_once(losses(out), alone)
    else:
        assert losses(out).keys() == alone.keys()


def test_a_rank_and_the_controller_are_killed_and_volunteers_find_their_way_back(
    cluster: Cluster, tmp_path: Path, alone: dict[int, float]
) -> None:
    """1. Two ranks, a volunteer each. 2. The controller gets SIGKILL: helpers go on, and so do steps. 3. It returns,
    and leaves them as they are. 4. A rank gets SIGKILL: the other one goes on in place, and makes the step whole with
    what it had of it; the volunteers help there, and the lost rank's device is taken in again. 5. Every step has every
    sample once."""
    out = tmp_path / "out"
    cluster.controller(etcd=cluster.etcd())
    for name in ("agent-0", "agent-1"):
        cluster.agent(name)
    for name in ("friend-1", "friend-2"):
        cluster.agent(name, 1.0, "--volunteer")
    cluster.wait_for_nodes(4)
    job = helped(cluster, out, "--sample-s=0.06", workers=(2, 2))
    cluster.wait_for(job, "two volunteers", lambda j: volunteers(j) == 2)
    before = {one.pid for name in ("friend-1", "friend-2") for one in helpers(cluster, name)}
    cluster.kill("controller")
    there = max(losses(out))
    wait_until("steps without a controller", lambda: max(losses(out)) > there + 3, 90)
    cluster.restart("controller")
    cluster.wait_for_nodes(4)
    seen = cluster.wait_for(job, "two volunteers as before", lambda j: volunteers(j) == 2 and len(j.workers) == 2)
    assert {one.pid for name in ("friend-1", "friend-2") for one in helpers(cluster, name)} == before
    kill(seen.workers[1].status.pid)
    cluster.wait_for_step(job, max(losses(out)) + 3)
    cluster.wait_for(job, "two volunteers again", lambda j: volunteers(j) == 2)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), cluster.story(job)
    each_sample_counted_once(losses(out), alone)
