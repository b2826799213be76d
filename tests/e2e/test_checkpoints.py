"""The persistent tier and its commands, by the real command in real processes. Stores are folders under file://."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from cluster import SCRIPTS, Cluster, alive, hurry, kill, kill_quietly, wait_until
from test_failures import check_every_sample_once
from test_memory import final, first_step, in_memory, resumed_at

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

ATOLL = (sys.executable, "-m", "atoll.cli.main")


def atoll(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ATOLL_CONTROLLER": ",".join(cluster.addresses)}
    return subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, timeout=120, check=False, env=env)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(cluster: Cluster, job: str) -> list[dict[str, object]]:
    reply = json.loads(printed(atoll(cluster, "checkpoints", job, "--json")))
    assert reply["notes"] == []
    found: list[dict[str, object]] = reply["checkpoints"]
    return found


def steps_in(url: str) -> list[int]:
    folders = Path(url.removeprefix("file://")).glob("*/step-*/manifest.json")
    return sorted(int(path.parent.name.split("-")[1]) for path in folders)


def restored(cluster: Cluster, *arguments: str) -> str:
    return str(json.loads(printed(atoll(cluster, "restore", "--json", *arguments)))["job"])


def exported(cluster: Cluster, job: str, to: Path) -> list[float]:
    printed(atoll(cluster, "export", job, "-o", str(to)))
    state = torch.load(to, weights_only=True)
    return [float(value) for tensor in state.values() for value in tensor.flatten()]


def test_train_kill_look_restore_and_export(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two machines train, a worker is killed. 2. Every tier shows. 3. The job ends: disk and store are left, of
    these the newest two and one for good. 4. A new job resumes from step 40 and ends with the same bits. 5. Its model
    is read by plain torch."""
    out, again, url = tmp_path / "out", tmp_path / "again", f"file://{tmp_path / 'store'}"
    cluster.local([1.0, 1.0])
    policy = common.CheckpointPolicy(every_steps=10, keep=2, keep_every_steps=40, directory=url, memory_replicas=2)
    job = cluster.submit("tiny.py", f"--out={out}", "--step-s=0.4", "--epochs=2", workers=(2, 2), checkpoint=policy)
    before = in_memory(cluster, job, 15)
    wait_until("a checkpoint is in the store", lambda: steps_in(url), 90)
    kill(before.workers[1].status.pid)
    in_memory(cluster, job, 25)
    whole = {(tier, "complete") for tier in ("own memory", "others' memory", "disk", "store")}

    def seen() -> set[tuple[object, object]]:  # the machines look one after the other, and memory changes meanwhile
        return {(row["tier"], row["health"]) for row in rows(cluster, job)}

    wait_until("every tier is whole", lambda: seen() >= whole, 60)
    hurry(out)
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE, cluster.story(job)
    wait_until("memory is given back", lambda: not [r for r in rows(cluster, job) if "memory" in str(r["tier"])], 60)
    for tier in ("disk", "store"):
        assert [row["step"] for row in rows(cluster, job) if row["tier"] == tier] == [100, 90, 80, 40]
    refused = atoll(cluster, "restore", job, "--step", "41")
    assert (refused.returncode, "no checkpoint of step 41" in refused.stderr) == (2, True), refused.stderr
    assert "there is step 40, 80, 90, 100" in refused.stderr
    other = restored(cluster, job, "--step", "40", "--name", "again", "--", f"--out={again}", "--step-s=0")
    assert other.startswith("again-")
    assert cluster.wait_for_end(other).phase == pb.PHASE_DONE, cluster.story(other)
    assert resumed_at(cluster, other) == [(40, "")]
    assert final(again) == final(out)
    assert exported(cluster, other, tmp_path / "model.pt") == final(out)
    assert [row["step"] for row in rows(cluster, job) if row["tier"] == "disk"] == [100, 90, 80, 40], "left as it was"


def test_a_machine_that_lost_its_disk_goes_on_from_the_store(cluster: Cluster, tmp_path: Path) -> None:
    """1. One machine, nothing in memory. 2. It is killed and its disk is gone. 3. It comes back: the store has it."""
    out, url = tmp_path / "out", f"file://{tmp_path / 'store'}"
    cluster.local([1.0])
    policy = common.CheckpointPolicy(every_steps=5, keep=2, directory=url, memory_replicas=0)
    job = cluster.submit("tiny.py", f"--out={out}", "--step-s=0.3", "--epochs=1", checkpoint=policy)
    wait_until("two checkpoints are in the store", lambda: len(steps_in(url)) > 1, 90)
    pid = cluster.job(job).workers[0].status.pid
    cluster.kill("agent-0")
    kill_quietly(pid)
    wait_until("its worker is dead", lambda: not alive(pid), 30)  # and writes nothing any more
    shutil.rmtree(cluster.folder / "jobs")
    newest = steps_in(url)[-1]
    cluster.restart("agent-0")
    hurry(out)
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE, cluster.story(job)
    assert resumed_at(cluster, job) == [(newest, "")]
    check_every_sample_once(out, samples=600, epochs=1)


def test_a_fresh_cluster_goes_on_from_the_url_alone(tmp_path: Path) -> None:
    """1. A job trains for one epoch; nothing but its store is left. 2. Another cluster trains the second epoch."""
    out, url = tmp_path / "out", f"file://{tmp_path / 'store'}"
    (tmp_path / "first").mkdir()
    with Cluster(tmp_path / "first") as first:
        first.local([1.0])
        policy = common.CheckpointPolicy(every_steps=0, keep=2, directory=url)
        job = first.submit("tiny.py", f"--out={out}", "--step-s=0", "--epochs=1", checkpoint=policy)
        assert first.wait_for_end(job).phase == pb.PHASE_DONE
    assert steps_in(url) == [50]
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "second").mkdir()
    with Cluster(tmp_path / "second") as second:
        second.local([1.0])
        script = ("--script", str(SCRIPTS / "tiny.py"), "--", f"--out={out / 'second'}", "--step-s=0", "--epochs=2")
        wrong = atoll(second, "restore", f"{url}/{job}", "--step", "7", *script)
        assert (wrong.returncode, "there is step 50" in wrong.stderr) == (2, True), wrong.stderr
        other = restored(second, f"{url}/{job}", *script)
        assert second.wait_for_end(other).phase == pb.PHASE_DONE, second.story(other)
        assert first_step(out / "second", 1) == 50
        assert exported(second, f"{url}/{job}", tmp_path / "model.pt") == final(out)
