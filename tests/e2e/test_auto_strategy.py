"""Jobs that leave their strategy to the controller, over links that are shaped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from behind_nat import why_not
from cluster import Cluster
from shaped_islands import ShapedIslands

from atoll.controller.planners.registry import PLANNERS
from atoll.v1 import jobs_pb2 as pb

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=f"NO TEST OF SHAPED LINKS HERE: {WHY_NOT}")


def test_a_thin_link_makes_a_job_leave_whole_gradients_in_place(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two named islands have 50 Mbit/s between them, and the job names no strategy. 2. It trains by another
    one than dense, in the same run, and says why. 3. The recorded input gives the recorded choice. 4. Every rank
    trained every step once."""
    out = tmp_path / "out"
    with ShapedIslands(2) as islands:
        islands.shape(50.0)
        islands.start(cluster, named=True)
        job = cluster.submit("sized.py", "--out", str(out), workers=(2, 2), strategy="auto", checkpoint_every=1000)
        seen = cluster.wait_for(
            job,
            "a chosen strategy in force",
            lambda now: now.strategy not in ("", "dense") and now.progress.step > 12,
            90,
        )
        reply = cluster.client.plans(job, 0)
        (out / "enough").touch()
        ended = cluster.wait_for_end(job)
        story = cluster.story(job)
        cluster.close_client()
    assert (ended.phase, ended.run) == (pb.PHASE_DONE, 1), story
    chosen = [one for one in reply.admissions if one.planner == "strategy"]
    assert chosen, story
    assert all(PLANNERS["strategy"].run_json(one.input) == one.output for one in chosen)
    assert json.loads(chosen[-1].output)["strategy"] == seen.strategy
    assert chosen[-1].reason in story
    for path in out.glob("rank-*.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == list(range(len(steps)))
