"""Estimates of what a rank has not sent, and of what its optimizer did, in the exchange of updates."""

from __future__ import annotations

import pytest
import torch
from exchange_job import ALL
from update_job import UpdateJob

from atoll.kernels.exchange_engine import EngineStats

WHOLE = 64 * 16 - 5  # every block is sampled
LARGE = 50_000


def stats(job: UpdateJob, rank: int = 0) -> EngineStats:
    return job.engines[rank].take_stats()


def squares(job: UpdateJob, rank: int, tensor: int) -> float:
    return float(job.residual(rank, tensor).square().sum())


def rounds(job: UpdateJob, count: int, k_blocks: int) -> None:
    for _ in range(count):
        for rank in job.ranks:
            job.walk(rank, k_blocks)
        job.drain()
        for rank in job.ranks:
            job.catch_up(rank, job.sync_round[rank] - 1)


@pytest.mark.parametrize("values", ["float32", "int2"])
@pytest.mark.parametrize("live", [torch.float32, torch.float16])
@pytest.mark.parametrize("by_hand", [False, True])
def test_of_a_small_tensor_both_are_exact(values: str, live: torch.dtype, by_hand: bool) -> None:
    """Weights of 16 bits forget nothing of others' updates either, which are no updates of this rank."""
    with UpdateJob([[0], [1]], [WHOLE], values=values, live=live, by_hand=by_hand) as job:
        rounds(job, 4, 9)
        stats(job)
        before = job.did[0][0].clone()
        rounds(job, 1, 9)
        told = stats(job)
        assert told.outstanding_squares == pytest.approx(squares(job, 0, 0), rel=2e-3)
        update = job.weights[0] * (job.did[0][0] - before)
        assert told.update_squares == pytest.approx(float(update.square().sum()), rel=2e-3)


def test_of_a_large_one_a_sample_tells_them() -> None:
    with UpdateJob([[0], [1]], [LARGE], values="float32") as job:
        rounds(job, 6, 300)
        stats(job)
        rounds(job, 1, 300)
        told = stats(job)
        assert told.outstanding_squares == pytest.approx(squares(job, 0, 0), rel=0.3)
        assert told.update_squares == pytest.approx(0.25 * LARGE * 0.1**2, rel=0.3)


def test_where_everything_is_sent_nothing_is_outstanding() -> None:
    with UpdateJob([[0], [1]], [WHOLE], values="float32") as job:
        rounds(job, 3, ALL)
        told = stats(job)
        assert told.outstanding_squares == pytest.approx(0, abs=1e-9)
        assert told.update_squares > 0


def test_what_changes_otherwise_is_no_update() -> None:
    """1. Before a first choice it is not known what was outstanding. 2. Nor after the weights were set: a flush took
    what was outstanding away, and that is no update."""
    with UpdateJob([[0], [1]], [WHOLE], values="float32") as job:
        rounds(job, 1, 9)
        first = stats(job)
        assert (first.outstanding_squares, first.update_squares) == (0, 0)
        rounds(job, 1, 9)
        assert stats(job).update_squares > 0
        job.engines[0].set_live(0, torch.zeros(WHOLE), job.weights[0], None)
        rounds(job, 1, 9)
        assert stats(job).update_squares == 0


def test_a_weight_that_is_not_finite_does_not_make_it_so() -> None:
    with UpdateJob([[0], [1]], [WHOLE], values="float32") as job:
        rounds(job, 2, 9)
        job.of[0][0].live[3] = torch.nan
        rounds(job, 2, 9)
        told = stats(job)
        assert 0 < told.outstanding_squares < 1e6
        assert 0 < told.update_squares < 1e6
