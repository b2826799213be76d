"""Devices whose memory does not hold the share that speeds alone would give them: the job trains to its end, on the
same samples as plain PyTorch with the whole batch."""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster
from full_cards import BATCH, assert_like_plain, assert_no_size_overflows_twice, largest_batches

from atoll.v1 import jobs_pb2 as pb


def test_a_device_that_runs_out_of_memory_gets_less_and_the_job_trains_on(pair: Cluster, tmp_path: Path) -> None:
    """1. Speeds of 1 : 0.5, a batch of 256, and memory for 150 samples each. 2. The first plan is even, and trains.
    3. By speed rank 0 would get 171: it runs out of memory. 4. The job continues with less there, without using up a
    restart."""
    out = tmp_path / "out"
    job = pair.submit("full_card.py", f"--out={out}", workers=(2, 2), max_restarts=0)
    ended = pair.wait_for_end(job, deadline_s=120)
    assert ended.phase == pb.PHASE_DONE, pair.story(job)
    assert largest_batches(out)[0][0] == BATCH // 2
    assert max(largest_batches(out)[0]) > 150, "no plan tried more than memory holds"
    assert_no_size_overflows_twice(out, 150)
    assert_like_plain(out)
    assert "ran out of memory with" in pair.story(job)
    assert ended.restarts == 0


def test_memory_that_runs_out_in_the_backward_pass_moves_the_batch_in_place(pair: Cluster, tmp_path: Path) -> None:
    """The same members meet in a next view with other shares, and train the step again: no process ends."""
    out = tmp_path / "out"
    job = pair.submit("full_card.py", f"--out={out}", "--raises-in=backward", "--scheduler", workers=(2, 2))
    ended = pair.wait_for_end(job, deadline_s=120)
    assert ended.phase == pb.PHASE_DONE, pair.story(job)
    assert max(largest_batches(out)[0]) > 150, "no plan tried more than memory holds"
    assert_no_size_overflows_twice(out, 150)
    assert_like_plain(out, scheduled=True)
    assert (ended.run, ended.restarts) == (1, 0), pair.story(job)
    assert "ran out of memory with" in pair.story(job)
