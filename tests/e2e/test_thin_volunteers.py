"""A job of strategy volunteer on a real cluster, and a volunteer whose owner lets it send little."""

from __future__ import annotations

import re
from pathlib import Path

from cluster import Cluster, wait_until
from test_volunteers import told

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def links(job: pb.Job) -> dict[str, common.LinkSample]:
    """By volunteer."""
    return {link.volunteer: link for worker in job.workers for link in worker.links if link.volunteer}


def test_who_has_a_thin_link_answers_in_fewer_bytes_and_waits_where_that_is_not_enough(
    cluster: Cluster, tmp_path: Path
) -> None:
    """1. An owner's limit lets an answer of 640 KB take more than a second, many times what it takes to compute. 2. The
    volunteer answers as int8. 3. That is not enough: it is told to wait, events say why, and the job trains on without
    it. Nobody takes who is late in each step for one that answers nothing."""
    out = tmp_path / "out"
    cluster.local([1.0])
    cluster.agent("friend", 1.0, "--volunteer", "--uplink-mbps=4")
    cluster.wait_for_nodes(2)
    job = cluster.submit(
        "helped.py",
        f"--out={out}",
        "--width=16000",
        "--epochs=10000",
        "--sample-s=0.005",
        strategy="volunteer",
        strategy_settings='{"thin_links":"int8"}',
    )
    wait_until("the verdict", lambda: "friend/0 waits for" in cluster.story(job), 90)
    story = cluster.story(job)
    assert "friend/0 has and answers int8 from now on: an answer takes its link" in story
    assert re.search(r"friend/0 waits for 60 s: an answer takes .* as int8\), so it adds \d+ % of its power", story), (
        story
    )
    assert "shut out" not in story
    waits = cluster.wait_for(job, "its link", lambda j: any(one.form == "waits" for one in links(j).values()))
    assert links(waits)["friend/0"].wait_share > 0.3
    (shown,) = (line for line in told(cluster, "status", job).splitlines() if line.startswith("volunteer "))
    assert shown.startswith("volunteer friend/0 of rank 0: waits, ")
    there = cluster.wait_for_step(job, waits.progress.step + 2)
    assert there.progress.strategy_metrics["waiting"] == 1
    cluster.client.cancel(job)
