"""Memory that bounds what devices train at once: a real limit of a control group, and batches in several passes."""

from __future__ import annotations

import os
from pathlib import Path

from cgroups import memory_group
from cluster import Cluster
from full_cards import BATCH, assert_like_plain, assert_no_size_overflows_twice, largest_batches

from atoll.v1 import jobs_pb2 as pb


def test_a_control_groups_limit_bounds_the_share_before_memory_runs_out(tmp_path: Path) -> None:
    """1. The faster agent is in a control group that has no room for what speed alone would give it. 2. Its worker
    measures its peak in the first steps. 3. No plan gives it more than fits: nothing is killed."""
    out = tmp_path / "out"
    with memory_group(f"atoll-mem-{os.getpid()}") as group, Cluster(tmp_path) as cluster:
        cluster.local([1.0, 0.5])
        group.add(cluster.processes["agent-0"].pid)
        group.limit(group.used_bytes() + 400_000_000)
        job = cluster.submit(
            "full_card.py", f"--out={out}", "--holds=1000", "--sample-floats=524288", "--steps=40",
            workers=(2, 2), max_restarts=0,
        )  # fmt: skip
        ended = cluster.wait_for_end(job, deadline_s=150)
        assert ended.phase == pb.PHASE_DONE, cluster.story(job)
        assert "ran out of memory" not in cluster.story(job)
        assert BATCH // 2 <= max(largest_batches(out)[0]) <= 165, cluster.story(job)  # by speed it would be 170
        assert_like_plain(out, 40)


def test_a_batch_that_no_split_fits_is_trained_in_several_passes(pair: Cluster, tmp_path: Path) -> None:
    """Both devices hold 60 samples, together less than half of the batch: each part is trained in several passes with
    one update, as plain PyTorch trains the whole batch, and the schedule of the rate moves once a step."""
    out = tmp_path / "out"
    job = pair.submit(
        "full_card.py", f"--out={out}", "--holds=60", "--scheduler", "--sample-s=0.0001",
        workers=(2, 2), max_restarts=0,
    )  # fmt: skip
    ended = pair.wait_for_end(job, deadline_s=150)
    assert ended.phase == pb.PHASE_DONE, pair.story(job)
    assert max(largest_batches(out)[0][-20:] + largest_batches(out)[1][-20:]) <= 60
    assert_no_size_overflows_twice(out, 60)
    assert_like_plain(out, scheduled=True)
    assert "passes, as memory holds no more" in pair.story(job)
