"""Jobs that end well, and scripts that do not: a clear reason each, nothing hanging."""

from __future__ import annotations

import json
from pathlib import Path

from cluster import SCRIPTS, Cluster

from atoll.v1 import jobs_pb2 as pb


def test_unequal_workers_get_unequal_shares_and_finish(pair: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = pair.submit(
        "tiny.py", f"--out={out}", "--epochs=6", "--batch-size=40", "--samples=2000", "--step-s=0.005",
        "--sample-s=0.001", workers=(2, 2),
    )  # fmt: skip
    pair.wait_for(
        job,
        "a plan that follows the speeds",
        lambda j: bool(j.plan.id) and j.workers[0].share > 1.5 * j.workers[1].share,
    )
    ended = pair.wait_for_end(job, deadline_s=120)
    assert ended.phase == pb.PHASE_DONE, pair.story(job)
    assert ended.checkpoint_step == 300
    pair.wait_for_output(job, "trained to the end", rank=0)
    assert json.loads((out / "final.json").read_text())["step"] == 300


def test_unmodified_torchrun_script(pair: Cluster) -> None:
    job = pair.submit("plain_torchrun.py", workers=(2, 2))
    assert pair.wait_for_end(job).phase == pb.PHASE_DONE, pair.story(job)
    pair.wait_for_output(job, "rank 1 of 2: sum 3")


def test_scripts_that_go_wrong_say_why(pair: Cluster) -> None:
    """One cluster for all, since a bad script must not harm the next job."""

    raising = pair.submit("bad.py", "raise", workers=(2, 2), name="raise", max_restarts=1)
    ended = pair.wait_for_end(raising)
    assert (ended.phase, ended.exit_code) == (pb.PHASE_FAILED, 1)
    assert "does not like its input" in ended.reason
    pair.wait_for_output(raising, "ValueError")

    early = pair.submit("leaves_early.py", workers=(2, 2), name="early", max_restarts=0)
    ended = pair.wait_for_end(early)
    assert ended.phase == pb.PHASE_FAILED
    assert "left early" in ended.reason

    garbage = pair.submit("bad.py", "garbage", name="garbage")
    assert pair.wait_for_end(garbage).phase == pb.PHASE_DONE
    pair.wait_for_output(garbage, "after the garbage")

    flood = pair.submit("bad.py", "flood", name="flood")
    assert pair.wait_for_end(flood).phase == pb.PHASE_DONE
    pair.wait_for_output(flood, "after the flood")
    kept = sum(path.stat().st_size for path in pair.folder.rglob("*rank-0.log*") if flood in str(path))
    assert kept < 64 * 2**20, "100 MB of output must not be kept whole"


def test_same_script_runs_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert Cluster.stock is not None
    done = Cluster.stock.run(str(SCRIPTS / "tiny.py"), f"--out={out}", "--epochs=1", "--step-s=0", timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "final.json").read_text())["step"] == 50


def test_a_second_agent_of_the_same_name_is_refused(pair: Cluster) -> None:
    pair.commands["twin"] = [
        word.replace(str(pair.folder / "agent-0"), str(pair.folder / "twin")) for word in pair.commands["agent-0"]
    ]
    pair.restart("twin")
    assert pair.processes["twin"].wait(90) == 1
    said = (pair.folder / "twin.log").read_text()
    assert "agent-0" in said
    assert "--name" in said
    assert "Traceback" not in said
    del pair.processes["twin"]
    assert [node.connected for node in pair.client.nodes().nodes] == [True, True]
