"""What dies, and what must go on. Every kill is SIGKILL unless the test says otherwise."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from pathlib import Path

from cluster import Cluster, alive, hurry, kill, trained_samples, wait_until

from atoll.v1 import jobs_pb2 as pb


def check_every_sample_once(out: Path, samples: int, epochs: int | None = None) -> None:
    """epochs: as many as were trained; None: any number, for scripts that end early."""
    lineage = trained_samples(out)
    assert sorted(lineage) == list(range(epochs or len(lineage)))
    for epoch, steps in lineage.items():
        counts = Counter(sample for batch in steps.values() for sample in batch)
        assert counts == Counter(range(samples)), f"epoch {epoch}: not each sample exactly once"


def test_killed_worker_costs_one_step_and_every_sample_still_counts_once(pair: Cluster, tmp_path: Path) -> None:
    """1. Rank 1 of a job that needs two is killed in mid-epoch. 2. Rank 0 stands still until another one has started in
    its stead. 3. View 2 goes on with the broken step, in the same run."""
    out = tmp_path / "out"
    work = ("--epochs=2", "--step-s=0.1")
    job = pair.submit("tiny.py", f"--out={out}", *work, workers=(2, 2), checkpoint_every=1000)
    before = pair.wait_for_step(job, 20)
    kill(before.workers[1].status.pid)
    pair.wait_for(job, "view 2 trains", lambda j: j.view == 2 and j.progress.step > before.progress.step)
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), pair.story(job)
    assert ended.restarts == 0, "a killed worker is not the script's fault"
    check_every_sample_once(out, samples=600, epochs=2)
    lines = [json.loads(line) for line in (out / "run-1-rank-0.jsonl").read_text().splitlines()]
    first = min(line["step"] for line in lines if line["view"] == 2)
    last = max(line["step"] for line in lines if line["view"] == 1)
    assert first in (last, last + 1)


def test_controller_killed_and_restarted_costs_no_step_and_no_worker(pair: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = pair.submit("tiny.py", f"--out={out}", "--epochs=1000", "--step-s=0.06", "--ends-early", workers=(2, 2))
    before = pair.wait_for_step(job, 20)
    pids = pair.worker_pids(job)
    pair.kill("controller")

    def steps_written() -> int:
        return len((out / "run-1-rank-0.jsonl").read_text().splitlines())

    at_kill = steps_written()
    wait_until("training goes on without a controller", lambda: steps_written() > at_kill + 30, 90)
    pair.restart("controller")
    pair.wait_for_step(job, before.progress.step + 40)
    pair.wait_for(job, "the same processes", lambda j: [w.status.pid for w in j.workers] == pids)
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), pair.story(job)
    check_every_sample_once(out, samples=600)


def test_leaders_and_etcd_are_killed_and_cost_no_step_and_no_worker(cluster: Cluster, tmp_path: Path) -> None:
    """1. The leader of two controllers is stopped (SIGSTOP): its connections stay open. The other leads, and agents and
    users find it. When the first goes on, it leads no more. 2. The second is killed, and the first leads again. 3. etcd
    is killed: training goes on without it, and its next start finds everything. 4. One run, and the same processes."""
    out = tmp_path / "out"
    cluster.led_by_one_of_two()
    cluster.close_client()  # the next one knows both controllers
    job = cluster.submit("tiny.py", f"--out={out}", "--epochs=1000", "--step-s=0.06", "--ends-early", workers=(2, 2))
    cluster.wait_for_step(job, 20)
    pids = cluster.worker_pids(job)

    def steps_written() -> int:
        return len((out / "run-1-rank-0.jsonl").read_text().splitlines())

    cluster.kill("controller-a", signal.SIGSTOP)
    cluster.wait_for_nodes(2)
    assert cluster.client.nodes().controller == cluster.addresses[1]
    cluster.kill("controller-a", signal.SIGCONT)
    wait_until("it says so", lambda: "leadership lost" in (cluster.folder / "controller-a.log").read_text(), 60)
    assert cluster.client.nodes().controller == cluster.addresses[1]
    cluster.wait_for_step(job, steps_written() + 10)
    cluster.kill("controller-b")
    cluster.wait_for_step(job, steps_written() + 10)
    assert cluster.client.nodes().controller == cluster.addresses[0]
    cluster.kill("etcd")
    at_kill = steps_written()
    wait_until("training goes on without etcd", lambda: steps_written() > at_kill + 30, 90)
    cluster.restart("etcd")
    cluster.wait_for_step(job, at_kill + 30)
    cluster.wait_for(job, "the same processes", lambda j: [w.status.pid for w in j.workers] == pids)
    hurry(out)
    ended = cluster.wait_for_end(job)
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), cluster.story(job)
    check_every_sample_once(out, samples=600)
    assert not any(alive(pid) for pid in pids)


def test_agent_killed_with_its_workers_job_shrinks_and_grows_again(pair: Cluster, tmp_path: Path) -> None:
    """1. One of two machines vanishes: the other trains on alone, in place. 2. It comes back, and its worker joins the
    run."""
    out = tmp_path / "out"
    work = ("--step-s=0.002", "--sample-s=0.01")  # of which two machines do half each; for longer than a start takes
    job = pair.submit("tiny.py", f"--out={out}", "--epochs=20", *work, workers=(1, 2))
    before = pair.wait_for(job, "two workers that train", lambda j: len(j.workers) == 2 and j.progress.step >= 10)
    worker = next(w.status.pid for w in before.workers if w.node == "agent-1")
    pair.kill("agent-1")
    wait_until("no worker outlives its agent", lambda: not alive(worker), 30)
    pair.wait_for(job, "training on one", lambda j: len(j.workers) == 1 and j.progress.step > before.progress.step + 5)
    pair.restart("agent-1")
    grown = pair.wait_for(job, "two workers again", lambda j: j.view >= 3 and len(j.workers) == 2, 180)
    pair.wait_for_step(job, grown.progress.step + 10)
    hurry(out)
    ended = pair.wait_for_end(job)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 1, 0), pair.story(job)
    check_every_sample_once(out, samples=600, epochs=20)


def test_stopped_worker_is_noticed_like_a_dead_one(pair: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = pair.submit("tiny.py", f"--out={out}", "--step-s=0.1", workers=(2, 2))
    before = pair.wait_for_step(job, 20)
    kill(before.workers[0].status.pid, signal.SIGSTOP)
    pair.wait_for(job, "view 2 trains", lambda j: j.view == 2 and j.progress.step > before.progress.step + 10)
    wait_until("the cause is told", lambda: "stopped" in pair.story(job).lower(), 30)
    hurry(out)
    assert pair.wait_for_end(job).phase == pb.PHASE_DONE
    check_every_sample_once(out, samples=600, epochs=2)


def test_a_script_that_hangs_is_stopped_where_its_user_says_how_long_a_step_may_take(
    pair: Cluster, tmp_path: Path
) -> None:
    """1. One of two workers waits for itself for ever in step 20; its link's thread still says that it lives. 2. It is
    stopped, and not the one that waits for it. 3. Run 2 goes on from there; the script is blamed."""
    out = tmp_path / "out"
    job = pair.submit(
        "tiny.py", f"--out={out}", "--hang-at=20", checkpoint_every=0, hang_s=10.0, max_restarts=1, workers=(2, 2)
    )
    ended = pair.wait_for_end(job, deadline_s=180)
    assert (ended.phase, ended.run, ended.restarts) == (pb.PHASE_DONE, 2, 1), pair.story(job)
    assert re.search(
        r"queued: rank 1 on agent-1 failed: no step for \d+ s after step 20 \(hang_s = 10\)", pair.story(job)
    )
    pair.wait_for_output(job, "resumes from step 20")
    check_every_sample_once(out, samples=600, epochs=2)


def test_cancel_stops_all_within_five_seconds(pair: Cluster, tmp_path: Path) -> None:
    job = pair.submit("tiny.py", f"--out={tmp_path / 'out'}", "--epochs=1000", workers=(2, 2))
    pair.wait_for_step(job, 5)
    pids = pair.worker_pids(job)
    asked_s = time.monotonic()
    pair.client.cancel(job)
    ended = pair.wait_for_end(job, deadline_s=10)
    assert ended.phase == pb.PHASE_CANCELLED
    assert time.monotonic() - asked_s < 5
    assert not any(alive(pid) for pid in pids)
