"""Reports of an engine on itself: changed blocks, the newest parts, digests, and the rounds its shared parameters are
of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_job import ALL, Job, same_bits

from atoll.kernels.exchange_engine import GradientEngine, Rule

SIZES = [1, 40, 1023]


def test_changes_are_taken_once_with_the_tail_padded() -> None:
    with Job([[0]], [40], live=None) as job:
        job.compress(0, ALL)
        job.apply(0)
        waited_s, [(version, index, values)] = job.engines[0].changes([0], 0, 5)
        assert (version, index.tolist()) == (0, [0, 1, 2])
        assert waited_s >= 0
        flat = torch.from_numpy(values).reshape(-1)
        assert same_bits(flat[:40], job.shared_params(0)[0])
        assert not flat[40:].any()
        assert job.engines[0].changes([0], 0, 5)[1][0].index.shape == (0,)


@pytest.mark.parametrize("remembered", [None, 2, 4, 5])
def test_recent_parts_are_those_of_the_newest_rounds_as_others_apply_them(remembered: int | None) -> None:
    """4, unless it is said otherwise."""
    kept = remembered or 4
    with Job([[0], [1]], [160, 320], values="bfloat16", selection="topk") as job:
        for engine in job.engines if remembered else ():
            engine.remember(kept)
        start = [shared_param.clone() for shared_param in job.shared_params(0)]
        for sync_round in range(6):
            job.compress(sync_round, 3)
            for engine in job.engines:
                engine.apply(sync_round, sync_round + 1, [(1.0, 0.0, 0.0, 0.0, 0.0)])
            job.exchange()
            if sync_round == 5 - kept:
                start = [shared_param.clone() for shared_param in job.shared_params(0)]
        parts = [engine.recent_parts() for engine in job.engines]
        assert [(part.sync_round, part.tensor) for part in parts[0]] == [
            (s, t) for s in range(6 - kept, 6) for t in (0, 1)
        ]
        for mine, theirs in zip(*parts, strict=True):
            total = torch.zeros_like(start[mine.tensor]).reshape(-1, 16)
            for part in (mine, theirs):
                total[torch.from_numpy(part.index.astype("int64"))] += torch.from_numpy(part.values)
            start[mine.tensor] -= total.reshape(-1)
        assert all(map(torch.equal, start, job.shared_params(0)))


def test_one_flipped_bit_changes_the_digest_and_only_that_tensors() -> None:
    with Job([[0], [1]], [1, 4099], digest_every=1) as job:
        for at, bit in [(0, 0), (4098, 31), (17, 5)]:
            job.of[1][1].shared_param.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 2**bit
            sync_round = job.engines[0].versions()[0] + 1
            for engine in job.engines:
                for tensor in range(2):
                    engine.compress(sync_round, tensor, None, 1.0, 1)
                engine.accumulate(sync_round)
            job.exchange()
            (same, mine), (same_there, theirs) = (sorted(p.digests()) for p in job.engines)
            assert same == same_there
            assert mine[:2] == theirs[:2] == (sync_round, 1)
            assert mine[2] != theirs[2]
            job.of[1][1].shared_param.copy_(job.of[0][1].shared_param)
        assert job.engines[0].digests() == []


def test_versions_begin_below_the_first_round_of_a_resumed_job() -> None:
    tensors = torch.zeros(16), torch.zeros(16)
    engine = GradientEngine(rank=0, islands=[[0]], first_round=41)
    try:
        engine.add_tensor(order=0, rule="sgd", shared_param=tensors[0], residual=tensors[1], live=torch.zeros(16))
        assert engine.versions() == [40]
        assert engine.fetch([0], 40, 0)[:2] == (40, 0)
        engine.compress(41, 0, torch.ones(16), 1.0, 1)
        engine.apply(41, 7, [(0.5, 0.0, 0.0, 0.0, 0.0)])
        assert engine.fetch([0], 41, 5)[0] == 41
        assert tensors[0].tolist() == [-0.5] * 16
    finally:
        engine.close()


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("islands", [[[0]], [[0], [1]], [[0, 1], [2]]])
def test_a_snapshot_of_a_round_is_what_a_job_has_that_stopped_there(islands: list[list[int]], rule: Rule) -> None:
    """1. Shared parameters, moments and residuals of round 2 are asked for while nothing of rounds 0 to 2 has come from
    anyone.
    2. Every rank chooses its part of round 3, which changes residuals; then all messages come and all four updates are
    made. 3. The copies have the very bits of a job that ended with round 2; so has what rounding the sums added to the
    leader's residual."""
    how: dict[str, Any] = {"rule": rule, "values": "float16", "selection": "topk", "lazy": True}
    with Job(islands, SIZES, **how) as stopped, Job(islands, SIZES, **how) as job:
        for one in (stopped, job):
            for sync_round in range(3):
                one.compress(sync_round, 7)
                one.apply(sync_round)
            for engine in one.engines:
                engine.idle(10)
        stopped.exchange()
        captured: dict[tuple[int, int, str], torch.Tensor] = {}
        for rank, engine in enumerate(job.engines):
            for tensor, mine in enumerate(job.of[rank]):
                names = ("shared_param", "first", "second", "last_step", "residual")
                captured |= {(rank, tensor, name): torch.zeros_like(getattr(mine, name)) for name in names}
                ranges = [
                    (getattr(mine, n).view(torch.uint8), captured[rank, tensor, n].view(torch.uint8)) for n in names
                ]
                engine.snapshot(2, tensor, ranges[:4])
                engine.snapshot_residual(2, tensor, captured[rank, tensor, "residual"])
        job.compress(3, 7)
        job.apply(3)
        job.exchange()
        for engine in job.engines:
            for tensor in range(len(SIZES)):
                engine.await_snapshot([tensor], 2, 5)
        for (rank, tensor, name), copy in captured.items():
            assert same_bits(copy, getattr(stopped.of[rank][tensor], name)), (rank, tensor, name)
            assert name in ("second", "last_step") or not same_bits(copy, getattr(job.of[rank][tensor], name)), name
