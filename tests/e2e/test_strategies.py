"""Jobs of strategies stale-sparse and groups through the real command, controller and agents."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from cluster import ATOLL, SCRIPTS, Cluster, hurry, kill, trained_samples
from warm import COMMAND_LINE

from atoll.v1 import jobs_pb2 as pb

SPARSE = ("--strategy", "stale-sparse", "--sparsity", "0.9")


def atoll(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert cluster.stock is not None
    return cluster.stock.run(COMMAND_LINE, "--controller", cluster.addresses[0], *arguments, timeout_s=120)


def submitted(cluster: Cluster, *arguments: str) -> str:
    """With the command; the job's id."""
    done = atoll(cluster, "submit", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def status(cluster: Cluster, job: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(atoll(cluster, "status", job, "--json").stdout)
    return shown


def test_a_sparse_job_tells_its_rate_and_links_and_follows_an_adjustment_to_the_end(
    pair: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tiny = (str(SCRIPTS / "tiny.py"), "--name", "sparse", "--workers", "2", *SPARSE)
    job = submitted(pair, *tiny, "--", f"--out={out}", "--epochs=6", "--step-s=0.3")
    pair.wait_for(job, "links and steps", lambda j: j.progress.step > 20 and all(w.links for w in j.workers))
    seen = status(pair, job)
    assert seen["spec"]["strategy"] == "stale-sparse"
    assert seen["progress"]["strategy_metrics"]["sparsity"] == 0.9
    assert 0 <= seen["progress"]["strategy_metrics"]["stall_share"] <= 1
    assert 0 <= seen["progress"]["strategy_metrics"]["fresh_share"] <= 1
    for rank, worker in enumerate(seen["workers"]):
        (link,) = worker["links"]
        assert link.get("peer", 0) == 1 - rank
        assert int(link["sent_bytes"]) > 0
        assert int(link["received_bytes"]) > 0
        assert not link.get("dropped")

    adjusted = atoll(pair, "adjust", job, "--sparsity", "0.5")
    assert adjusted.returncode == 0, adjusted.stderr
    assert "sparsity 0.5" in adjusted.stdout
    changed = pair.wait_for(
        job, "steps at the new sparsity", lambda j: j.progress.strategy_metrics.get("sparsity") == 0.5
    )
    assert changed.run == 1
    assert "sparsity 50.00 %" in atoll(pair, "status", job).stdout
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run, ended.checkpoint_step) == (pb.PHASE_DONE, 1, 300), pair.story(job)
    for steps in trained_samples(out).values():
        assert Counter(sample for batch in steps.values() for sample in batch) == Counter(range(600))


def test_a_killed_worker_of_a_sparse_job_costs_the_others_no_sample(pair: Cluster, tmp_path: Path) -> None:
    """1. The sparsity is adjusted, then rank 1 is killed. 2. The other keeps its process and stands still until rank 2
    takes the place, at that sparsity. 3. No sample counts twice in an epoch; only the killed worker's last ones may not
    count at all. 4. The run goes on from the newest step that is whole in memory, which is of the same epoch: nobody
    goes back over an epoch's end in place."""
    out = tmp_path / "out"
    job = pair.submit(
        "tiny.py", f"--out={out}", "--epochs=1", "--samples=6000", "--step-s=0.06", workers=(2, 2),
        checkpoint_every=1000, strategy="stale-sparse", strategy_settings='{"sparsity":0.9}',
    )  # fmt: skip
    pair.wait_for_step(job, 10)
    pair.client.adjust(job, params={"sparsity": 0.8})
    before = pair.wait_for(
        job, "steps at the new sparsity, one in memory",
        lambda j: j.progress.strategy_metrics.get("sparsity") == 0.8 and j.memory_step > 0,
    )  # fmt: skip
    kill(before.workers[1].status.pid)
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), pair.story(job)
    assert ended.progress.strategy_metrics["sparsity"] == 0.8
    (steps,) = trained_samples(out).values()
    counts = Counter(sample for batch in steps.values() for sample in batch)
    assert set(counts.values()) == {1}
    assert len(counts) >= 6000 - 2 * 6  # two steps of half a batch
    joined = [json.loads(line)["step"] for line in (out / "run-1-rank-2.jsonl").read_text().splitlines()]
    left = [json.loads(line)["step"] for line in (out / "run-1-rank-1.jsonl").read_text().splitlines()]
    assert left[0] < joined[0] <= left[-1] + 1


def test_wrong_settings_are_refused_in_words(pair: Cluster, tmp_path: Path) -> None:
    tiny = str(SCRIPTS / "tiny.py")
    dense = submitted(pair, tiny, "--name", "dense", "--", f"--out={tmp_path / 'out'}", "--epochs=100")
    cases = [
        (("submit", tiny, "--strategy", "sparse"), 2, "stale-sparse"),
        (("submit", tiny, "--strategy", "stale-sparse", "--sparsity", "1.5"), 2, "sparsity"),
        (("submit", tiny, "--sparsity", "0.9"), 2, "stale-sparse"),
        (("adjust", "no-such-job", "--sparsity", "0.9"), 2, "no-such-job"),
        (("adjust", dense, "--sparsity", "1.5"), 2, "sparsity"),
        (("adjust", dense, "--sparsity", "0.9"), 2, "of strategy dense: strategy_params.sparsity"),
    ]
    for arguments, code, word in cases:
        refused = atoll(pair, *arguments)
        assert refused.returncode == code, (arguments, refused.stdout, refused.stderr)
        assert word in refused.stderr, refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert atoll(pair, "cancel", dense).returncode == 0
    pair.wait_for_end(dense)


def test_a_compressed_job_is_planned_by_what_its_workers_measured_and_explained(pair: Cluster, tmp_path: Path) -> None:
    """1. Workers tell what their tensors, their link and compression cost. 2. The controller's plan says which tensors
    are one group and how they go; it holds on all workers from one step on. 3. `atoll plans` says why, and its planner
    derives it again. 4. Every sample counts once."""
    out = tmp_path / "out"
    settings = tmp_path / "job" / "job.toml"  # what is beside it travels with the job
    settings.parent.mkdir()
    settings.write_text('strategy = "compressed"\n[compressed]\nalgorithm = "ef-sign"\nmin_bytes = 0\n')
    tiny = (str(SCRIPTS / "tiny.py"), "--name", "compressed", "--workers", "2", "--config", str(settings))
    job = submitted(pair, *tiny, "--", f"--out={out}", "--epochs=6", "--step-s=0.2")
    pair.wait_for(job, "a plan that groups tensors", lambda j: '"groups"' in j.plan.strategy_params)
    pair.wait_for(job, "steps under it", lambda j: all(w.last.plan >= j.plan.id for w in j.workers))
    hurry(out)
    plans = json.loads(atoll(pair, "plans", job, "--json").stdout)["plans"]
    grouped = next(one for one in plans if one["plan"]["planner"] == "tensor-groups")
    assert "groups" in grouped["plan"]["reason"]
    assert "predicted" in grouped["plan"]["reason"]
    again = subprocess.run(
        [*ATOLL, "decide", "tensor-groups"], input=grouped["input"], capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == grouped["output"]
    assert "EF-sign" in atoll(pair, "status", job).stdout
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run, ended.checkpoint_step) == (pb.PHASE_DONE, 1, 300), pair.story(job)
    for steps in trained_samples(out).values():
        assert Counter(sample for batch in steps.values() for sample in batch) == Counter(range(600))


def test_a_running_job_changes_its_strategy_in_place_there_and_back(pair: Cluster, tmp_path: Path) -> None:
    """1. A job trains by `dense`. 2. Its user asks for `local-steps`: the same processes go on by it from a boundary,
    and events, status and plans say from when, and who asked. 3. The pin is taken off, and `dense` is back. 4. One run
    trains each sample once, and a strategy that no run can change to is refused."""
    out = tmp_path / "out"
    tiny = (str(SCRIPTS / "tiny.py"), "--name", "switched", "--workers", "2", "--strategy", "dense")
    job = submitted(pair, *tiny, "--", f"--out={out}", "--epochs=8", "--step-s=0.05")
    before = pair.wait_for(job, "steps", lambda j: j.progress.step > 10)
    refused = atoll(pair, "adjust", job, "--strategy", "groups")
    assert refused.returncode != 0
    assert "a run cannot begin strategy groups at a step boundary" in refused.stderr

    adjusted = atoll(pair, "adjust", job, "--strategy", "local-steps")
    assert adjusted.returncode == 0, adjusted.stderr
    assert "pinned: strategy local-steps" in adjusted.stdout
    changed = pair.wait_for(job, "local-steps", lambda j: j.strategy == "local-steps" and j.progress.step > 25)
    assert "switched from dense to local-steps at step" in changed.strategy_reason
    text = atoll(pair, "status", job).stdout
    assert "strategy local-steps (switched from dense to local-steps at step " in text
    assert "asked by unauthenticated" in text
    pair.wait_for(job, "its metrics", lambda j: "stall_share" in j.progress.strategy_metrics)
    plans = atoll(pair, "plans", job).stdout
    assert "by strategy local-steps" in plans

    assert atoll(pair, "adjust", job, "--unpin", "strategy").returncode == 0
    pair.wait_for(job, "dense", lambda j: j.strategy == "dense" and j.view == 3)
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), pair.story(job)
    assert {w.status.pid for w in before.workers} == {w.status.pid for w in changed.workers}
    texts = [event.text for event in pair.client.events(job)]
    assert sum("switched from" in text for text in texts) == 2, pair.story(job)
    for steps in trained_samples(out).values():
        assert Counter(sample for batch in steps.values() for sample in batch) == Counter(range(600))


def test_a_job_whose_script_refuses_the_default_strategy_trains_by_the_one_it_allows(pair: Cluster) -> None:
    """1. Nobody names a strategy; the model has sparse gradients, which `dense` refuses. 2. All workers train by `zen`
    from their first step on, and report it. 3. The controller records it for the job's next run, and says why."""
    script = str(SCRIPTS.parents[1] / "atoll/cli/scripts/advised.py")
    options = ("--workers", "2", "--strategy", "auto", "--env", "MODEL=words", "--env", "EPOCHS=300")
    job = submitted(pair, script, "--name", "words", *options)
    pair.wait_for(job, "steps by zen", lambda j: j.progress.strategy_metrics.get("density", 0) > 0)
    pair.wait_for(job, "the recorded strategy", lambda j: "zen" in j.strategy_reason or j.strategy == "zen")
    assert "strategy dense is not taken, zen stays: 0 makes sparse gradients" in pair.story(job)
    pair.wait_for_output(job, "trains by zen: dense was chosen automatically", rank=0)
    pair.client.cancel(job)
