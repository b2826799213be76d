"""Replicas of strategy groups, with a real controller and agents: of unequal speed, and one that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cluster import SCRIPTS, Cluster, hurry, kill
from test_strategies import atoll, submitted

from atoll.v1 import jobs_pb2 as pb


def test_unequal_workers_are_grouped_by_the_controller_and_train_every_sample_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """1. A job of three workers waits for a third device and says so, until one comes. 2. Of three workers one is three
    times slower. 3. The controller answers their signals, also when a window ends: the fast two average without the
    slow one, which trains less. 4. Every sample counts once an epoch."""
    out = tmp_path / "out"
    cluster.local([1.0, 1.0])
    waits = cluster.submit("bad.py", "sleep", "0", workers=(3, 3))
    seen = cluster.wait_for(waits, "a reason", lambda j: j.phase == pb.PHASE_QUEUED and "3" in j.reason)
    assert "waiting" in seen.reason
    cluster.agent("agent-2")
    assert cluster.wait_for_end(waits).phase == pb.PHASE_DONE
    script = (str(SCRIPTS / "rounds.py"), "--workers", "3", "--strategy", "groups")
    job = submitted(cluster, *script, "--", f"--out={out}", "--slow-rank=2")
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), cluster.story(job)
    metrics = ended.progress.strategy_metrics
    assert 1 / 3 < metrics["group_share"] < 1
    assert "strategy groups: grouping scheduled  groups of " in atoll(cluster, "status", job).stdout
    told = [[json.loads(line) for line in (out / f"rank-{rank}.jsonl").read_text().splitlines()] for rank in range(3)]
    assert [line["loss"] for line in told[0]] == [line["loss"] for line in told[2]]
    for epoch in range(3):
        counted = Counter(
            sample for lines in told for line in lines if line["epoch"] == epoch for sample in line["ids"]
        )
        assert counted == Counter(range(360))
    trained = [sum(len(line["ids"]) for line in lines) for lines in told]
    assert trained[2] < min(trained[:2])


@pytest.mark.timeout(300)
def test_replicas_make_their_round_without_a_killed_one_which_is_replaced(trio: Cluster, tmp_path: Path) -> None:
    """1. Three replicas of strategy groups train at their own pace; one is killed (SIGKILL). 2. The others make the
    round without it, stand at no step that they had made, and go on in view 2, as the same processes. 3. Another starts
    in its stead and is taken in, with their state. 4. No survivor trains a sample twice in an epoch, and what the lost
    one had for itself is trained by them: none is left out."""
    out = tmp_path / "out"
    job = trio.submit("rounds.py", f"--out={out}", "--epochs=600", workers=(2, 3), strategy="groups")
    before = trio.wait_for_step(job, 4)
    pids = {worker.rank: worker.status.pid for worker in before.workers}
    kill(pids.pop(1))
    now = trio.wait_for(job, "three replicas again", lambda now: now.view == 3 and len(now.workers) == 3, 90)
    assert {worker.rank: worker.status.pid for worker in now.workers if worker.rank != 3} == pids
    assert "view 2: 2 workers paused for " in trio.story(job)
    trio.wait_for_step(job, now.progress.step + 4)
    lines = (out / "rank-0.jsonl").read_text().splitlines(keepends=True)
    last = 2 + max(json.loads(line)["epoch"] for line in lines if line.endswith("\n"))  # no rank has begun it
    (out / "last").write_text(str(last))
    (out / "last").rename(out / "last-epoch")
    hurry(out)
    end = trio.wait_for_end(job, 120)
    assert (end.phase, end.run, end.restarts) == (pb.PHASE_DONE, 1, 0), trio.story(job)
    check_rounds(out, lost=1, epochs=last + 1)


def check_rounds(out: Path, *, lost: int, epochs: int) -> None:
    """What rounds.py leaves. Of a round that was begun in several views the newest counts."""
    batches = [
        {**json.loads(line), "rank": int(path.stem.split("-")[1])}
        for path in out.glob("rank-*.batches")
        for line in path.read_text().splitlines()
    ]
    newest: dict[int, int] = {}
    for batch in batches:
        newest[batch["step"]] = max(newest.get(batch["step"], 0), batch["view"])
    counted = [batch for batch in batches if batch["view"] == newest[batch["step"]]]
    by_others = Counter((one["step"], id_) for one in counted if one["rank"] != lost for id_ in one["ids"])
    assert set(by_others.values()) == {1}
    everything = {(one["step"], id_) for one in counted for id_ in one["ids"]}
    assert Counter(id_ for _, id_ in everything) == dict.fromkeys(range(360), epochs)


def test_the_example_of_a_pipeline_trains_in_two_stages(trio: Cluster) -> None:
    """As its first lines say: the job file alone. It need not train to its end."""
    config = str(Path(__file__).parents[2] / "examples/pipeline.toml")
    command = (
        sys.executable,
        "-m",
        "atoll.cli.main",
        "--controller",
        trio.addresses[0],
        "submit",
        "--config",
        config,
    )
    job = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    trained = trio.wait_for(job, "rounds", lambda seen: seen.progress.step >= 2 and "loss" in seen.progress.metrics)
    assert 0 < trained.progress.metrics["loss"] < 6.5, trio.story(job)  # log of 256 bytes at first: 5.5
    trio.client.cancel(job)
    assert trio.wait_for_end(job).phase == pb.PHASE_CANCELLED, trio.story(job)
