"""Devices whose memory does not hold the share that speeds alone would give them: the job trains to its end, on the
same samples as plain PyTorch with the whole batch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from cgroups import memory_group
from cluster import Cluster, trained_samples
from torch import nn

from atoll.v1 import jobs_pb2 as pb

BATCH = 256


def plain_weights(out: Path, steps: int, *, scheduled: bool) -> torch.Tensor:
    """Train the recorded steps on whole batches in one process, without Atoll."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCH * steps, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    trained = trained_samples(out)[0]
    assert sorted(i for ids in trained.values() for i in ids) == list(range(BATCH * steps))
    for step in sorted(trained):
        assert len(trained[step]) == BATCH
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[trained[step]]), targets[trained[step]]).backward()
        optimizer.step()
        if scheduled:
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_like_plain(out: Path, steps: int = 60, *, scheduled: bool = False) -> None:
    final = json.loads((out / "final.json").read_text())
    assert final["steps"] == steps
    torch.testing.assert_close(
        torch.tensor(final["weights"]), plain_weights(out, steps, scheduled=scheduled), rtol=1e-4, atol=1e-5
    )


def largest_batches(out: Path) -> dict[int, list[int]]:
    """Return each rank's batch sizes in the order of its passes, over all runs."""
    found: dict[int, list[int]] = {}
    for path in sorted(out.glob("run-*-rank-*.jsonl"), key=lambda path: int(path.name.split("-")[1])):
        sizes = [len(json.loads(line)["ids"]) for line in path.read_text().splitlines()]
        found.setdefault(int(path.stem.split("-")[3]), []).extend(sizes)
    return found


def assert_no_size_overflows_twice(out: Path, holds: int) -> None:
    for sizes in largest_batches(out).values():
        too_large = [size for size in sizes if size > holds]
        assert len(set(too_large)) == len(too_large), too_large


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
