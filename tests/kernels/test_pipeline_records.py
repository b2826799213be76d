"""What a pipeline tells of itself: changed blocks, the newest parts, digests, and the steps its masters are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_job import ALL, Job, same_bits

from atoll.kernels.pipeline import Pipeline, Rule

SIZES = [1, 40, 1023]


def test_changes_are_taken_once_with_the_tail_padded() -> None:
    with Job([[0]], [40], live=None) as job:
        job.compress(0, ALL)
        job.apply(0)
        version, waited_s, index, values = job.pipelines[0].changes(0, 0, 5)
        assert (version, index.tolist()) == (0, [0, 1, 2])
        assert waited_s >= 0
        flat = torch.from_numpy(values).reshape(-1)
        assert same_bits(flat[:40], job.masters(0)[0])
        assert not flat[40:].any()
        assert job.pipelines[0].changes(0, 0, 5)[2].shape == (0,)


def test_recent_parts_are_those_of_the_newest_4_steps_as_others_apply_them() -> None:
    with Job([[0], [1]], [160, 320], values="bfloat16", selection="topk") as job:
        start = [master.clone() for master in job.masters(0)]
        for step in range(6):
            job.compress(step, 3)
            for pipeline in job.pipelines:
                pipeline.apply(step, step + 1, [(1.0, 0.0, 0.0, 0.0, 0.0)])
            job.exchange()
            if step == 1:
                start = [master.clone() for master in job.masters(0)]
        parts = [pipeline.recent_parts() for pipeline in job.pipelines]
        assert [(part.step, part.tensor) for part in parts[0]] == [(s, t) for s in (2, 3, 4, 5) for t in (0, 1)]
        for mine, theirs in zip(*parts, strict=True):
            total = torch.zeros_like(start[mine.tensor]).reshape(-1, 16)
            for part in (mine, theirs):
                total[torch.from_numpy(part.index.astype("int64"))] += torch.from_numpy(part.values)
            start[mine.tensor] -= total.reshape(-1)
        assert all(map(torch.equal, start, job.masters(0)))


def test_one_flipped_bit_changes_the_digest_and_only_that_tensors() -> None:
    with Job([[0], [1]], [1, 4099], digest_every=1) as job:
        for at, bit in [(0, 0), (4098, 31), (17, 5)]:
            job.of[1][1].master.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 2**bit
            step = job.pipelines[0].versions()[0] + 1
            for pipeline in job.pipelines:
                for tensor in range(2):
                    pipeline.compress(step, tensor, None, 1.0, 1)
                pipeline.carry(step)
            job.exchange()
            (same, mine), (same_there, theirs) = (sorted(p.digests()) for p in job.pipelines)
            assert same == same_there
            assert mine[:2] == theirs[:2] == (step, 1)
            assert mine[2] != theirs[2]
            job.of[1][1].master.copy_(job.of[0][1].master)
        assert job.pipelines[0].digests() == []


def test_versions_begin_below_the_first_step_of_a_resumed_job() -> None:
    tensors = torch.zeros(16), torch.zeros(16)
    pipeline = Pipeline(rank=0, islands=[[0]], first_step=41)
    try:
        pipeline.add_tensor(order=0, rule="sgd", master=tensors[0], residual=tensors[1], live=torch.zeros(16))
        assert pipeline.versions() == [40]
        assert pipeline.fetch([0], 40, 0)[:2] == (40, 0)
        pipeline.compress(41, 0, torch.ones(16), 1.0, 1)
        pipeline.apply(41, 7, [(0.5, 0.0, 0.0, 0.0, 0.0)])
        assert pipeline.fetch([0], 41, 5)[0] == 41
        assert tensors[0].tolist() == [-0.5] * 16
    finally:
        pipeline.close()


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("islands", [[[0]], [[0], [1]], [[0, 1], [2]]])
def test_what_is_kept_of_a_step_is_what_a_job_has_that_stopped_there(islands: list[list[int]], rule: Rule) -> None:
    """1. Masters, moments and residuals of step 2 are asked for while nothing of steps 0 to 2 has come from anyone.
    2. Every rank chooses its part of step 3, which changes residuals; then all messages come and all four updates are
    made. 3. The copies have the very bits of a job that ended with step 2; so has what rounding the sums added to the
    leader's residual."""
    how: dict[str, Any] = {"rule": rule, "values": "float16", "selection": "topk", "lazy": True}
    with Job(islands, SIZES, **how) as stopped, Job(islands, SIZES, **how) as job:
        for one in (stopped, job):
            for step in range(3):
                one.compress(step, 7)
                one.apply(step)
            for pipeline in one.pipelines:
                pipeline.idle(10)
        stopped.exchange()
        kept: dict[tuple[int, int, str], torch.Tensor] = {}
        for rank, pipeline in enumerate(job.pipelines):
            for tensor, mine in enumerate(job.of[rank]):
                names = ("master", "first", "second", "last_step", "residual")
                kept |= {(rank, tensor, name): torch.zeros_like(getattr(mine, name)) for name in names}
                ranges = [(getattr(mine, n).view(torch.uint8), kept[rank, tensor, n].view(torch.uint8)) for n in names]
                pipeline.keep(2, tensor, ranges[:4])
                pipeline.keep_owed(2, tensor, None, kept[rank, tensor, "residual"])
        job.compress(3, 7)
        job.apply(3)
        job.exchange()
        for pipeline in job.pipelines:
            for tensor in range(len(SIZES)):
                pipeline.take_kept(tensor, 2, 5)
        for (rank, tensor, name), copy in kept.items():
            assert same_bits(copy, getattr(stopped.of[rank][tensor], name)), (rank, tensor, name)
            assert name in ("second", "last_step") or not same_bits(copy, getattr(job.of[rank][tensor], name)), name
