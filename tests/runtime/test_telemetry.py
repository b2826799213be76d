"""What a run tells of its steps: real workers whose work takes a known time at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from zmq_agent import FakeAgent, Start

from atoll.strategies.declaration import as_json
from atoll.v1.common_pb2 import StepSample

PARTS = ("load_s", "forward_s", "backward_s", "update_s")
LEAST_S = (0.01, 0.02, 0.03, 0.01)  # see parts.py
FIRST_BUCKET_S = 0.01
WHOLE, STEPS = 12, 20  # those that can be cut up come first


def train(agent: FakeAgent) -> list[list[StepSample]]:
    """Rank 1 at half speed. The samples of each rank."""
    agent.speeds[1] = 0.5
    agent.start_workers("parts.py")
    assert agent.exit_codes() == [0, 0], agent.said()
    samples = [agent.steps[rank] for rank in range(2)]
    assert [[sample.step for sample in of_rank] for of_rank in samples] == [list(range(STEPS))] * 2
    assert agent.entries == dict.fromkeys(range(2), 4 * 4 + 4 + 5 * 300_000)
    return samples


def check_parts(samples: Sequence[StepSample], speed: float) -> None:
    """A slowed rank that sleeps too long for one part sleeps less for the next, so single parts are not exact there."""
    for sample in samples:
        parts = [getattr(sample, part) for part in PARTS]
        assert all(part >= 0.99 * least_s for part, least_s in zip(parts, LEAST_S, strict=True)), sample
        assert math.isclose(sum(parts), sample.compute_s, rel_tol=1e-9)
        assert sample.step_s >= sample.compute_s
        assert sample.first_bucket_s <= sample.backward_s
    for part, least_s in zip(PARTS, LEAST_S, strict=True):
        assert fmean(getattr(sample, part) for sample in samples) >= 0.75 * least_s / speed, part
    assert fmean(sample.compute_s for sample in samples) >= 0.95 * sum(LEAST_S) / speed


def check_no_parts(sample: StepSample) -> None:
    assert [getattr(sample, part) for part in (*PARTS, "first_bucket_s")] == [0.0] * 5
    assert sample.compute_s >= 0.99 * sum(LEAST_S[:3])


def test_parts_sum_up_and_a_rank_at_half_speed_takes_twice_as_long_for_each(start: Start, tmp_path: Path) -> None:
    """1. Both ranks train; what one waits for the other is in no part. 2. All-reduces are timed: the bucket that leaves
    in mid-pass and the last one. 3. Then the script calls loss.backward(), then it accumulates: there are no parts."""
    with FakeAgent(tmp_path, world_size=2, start=start) as agent:
        samples = train(agent)
    for rank, speed in ((0, 1.0), (1, 0.5)):
        check_parts(samples[rank][:WHOLE], speed)
        assert all(sample.first_bucket_s >= 0.99 * FIRST_BUCKET_S for sample in samples[rank][:WHOLE])
        for sample in samples[rank][WHOLE:]:
            check_no_parts(sample)
        assert all(0 < sample.sync_s + sample.last_sync_s < sample.step_s for sample in samples[rank])
        assert all(sample.sync_s > 0 for sample in samples[rank])


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_strategies_that_do_not_wait_have_parts_and_no_synchronisation(
    start: Start, tmp_path: Path, exchange: str
) -> None:
    with FakeAgent(tmp_path, world_size=2, start=start) as agent:
        agent.spec.strategy = "stale-sparse"
        agent.spec.strategy_settings = as_json({"sparsity": 0.9, "exchange": exchange})
        samples = train(agent)
    for rank, speed in ((0, 1.0), (1, 0.5)):
        check_parts(samples[rank][:WHOLE], speed)
        for sample in samples[rank]:
            assert (sample.sync_s, sample.last_sync_s) == (0.0, 0.0)
        assert [sample.step for sample in samples[rank] if sample.halves] == [0, 10]
        assert all(sample.local_grad_sqnorm > 0 < sample.global_grad_sqnorm for sample in samples[rank][::10])
        buckets = [sample.first_bucket_s for sample in samples[rank][:WHOLE]]
        assert all(bucket_s > 0 for bucket_s in buckets) == (exchange == "gradients")
