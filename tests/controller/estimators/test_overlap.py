from __future__ import annotations

import random

import pytest

from atoll.controller.estimators.overlap import NEEDED_STEPS, PENDING_STEPS, OverlapEstimator
from atoll.controller.estimators.profile import OverlapEstimate
from atoll.step_estimators.estimates import RankEstimate
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.robust import ClippedMean
from atoll.step_estimators.sums import sync_of

GAMMA, T_O, T_U = 0.2, 0.05, 0.01


def step(
    number: int, *, first_bucket_s: float, sync_s: float, last_sync_s: float, backward_s: float = 0.1
) -> ObservedStep:
    return ObservedStep(
        step=number, plan=1, local_batch=8, total_batch=24, step_s=0.3, compute_s=0.2, load_s=0.05, forward_s=0.04,
        backward_s=backward_s, first_bucket_s=first_bucket_s, update_s=0.01, sync_s=sync_s, last_sync_s=last_sync_s,
    )  # fmt: skip


class Run:
    """An estimator of the overlap with its ranks' own means, as each machine makes them."""

    def __init__(self) -> None:
        self.overlap = OverlapEstimator()
        self.gammas: dict[int, ClippedMean] = {}

    def observe(self, rank: int, observed: ObservedStep) -> None:
        gamma = self.gammas.setdefault(rank, ClippedMean())
        if observed.backward_s > 0:
            gamma.observe(observed.first_bucket_s / observed.backward_s)
        self.overlap.observe(observed.step, sync_of(observed))

    def estimate(self) -> OverlapEstimate | None:
        return self.overlap.estimate(
            RankEstimate(gamma=gamma.mean, gamma_variance=gamma.variance_of_mean()) for gamma in self.gammas.values()
        )


def told(estimator: Run, rng: random.Random, numbers: range, *, t_o: float = T_O, ranks: int = 3) -> None:
    """The last rank waits for nobody; the others wait for it, 20 to 60 ms. The first rank's clock is a bad one."""
    for number in numbers:
        for rank in range(ranks):
            waits_s = 0.0 if rank == ranks - 1 else rng.uniform(0.02, 0.06)
            spread = 0.06 if rank == 0 else 0.005
            estimator.observe(
                rank,
                step(
                    number,
                    first_bucket_s=0.1 * min(max(rng.gauss(GAMMA, spread), 0.01), 0.99),
                    sync_s=t_o * rng.lognormvariate(0, 0.03) + waits_s,
                    last_sync_s=T_U * rng.lognormvariate(0, 0.03) + waits_s / 10,
                ),
            )


def test_waiting_for_slower_ranks_is_no_communication() -> None:
    estimator = Run()
    told(estimator, random.Random(1), range(30))
    found = estimator.estimate()
    assert found is not None
    assert found.t_o == pytest.approx(T_O, rel=0.05)
    assert found.t_u == pytest.approx(T_U, rel=0.05)
    assert 0 < found.error_s < 0.1 * T_O


def test_gamma_is_weighted_by_how_sure_each_rank_is() -> None:
    """A plain mean over three ranks of which one is twelve times less sure would be off five times as far."""
    off = []
    for seed in range(40):
        estimator = Run()
        told(estimator, random.Random(seed), range(30))
        found = estimator.estimate()
        assert found is not None
        off.append((found.gamma - GAMMA) ** 2)
    assert (sum(off) / len(off)) ** 0.5 < 0.0025


def test_nothing_is_said_before_enough_steps_were_told_by_all() -> None:
    estimator = Run()
    told(estimator, random.Random(1), range(NEEDED_STEPS - 1))
    estimator.observe(0, step(99, first_bucket_s=0.02, sync_s=0.1, last_sync_s=0.1))
    assert estimator.estimate() is None
    told(estimator, random.Random(1), range(NEEDED_STEPS - 1, NEEDED_STEPS))
    assert estimator.estimate() is not None


def test_ranks_tell_their_steps_at_different_moments() -> None:
    """Each tells twenty at once; what the last one told first is of steps that the others told long ago."""
    estimator, rng = Run(), random.Random(2)
    for rank in (0, 1, 2):
        for number in range(20):
            waits_s = 0.0 if rank == 2 else rng.uniform(0.02, 0.06)
            estimator.observe(rank, step(number, first_bucket_s=0.02, sync_s=T_O + waits_s, last_sync_s=T_U))
    found = estimator.estimate()
    assert found is not None
    assert (found.gamma, found.t_o, found.t_u) == (pytest.approx(0.2), pytest.approx(T_O), pytest.approx(T_U))


def test_a_link_that_becomes_slower_is_followed_within_ten_steps() -> None:
    estimator, rng = Run(), random.Random(3)
    told(estimator, rng, range(100))
    told(estimator, rng, range(100, 110), t_o=3 * T_O)
    found = estimator.estimate()
    assert found is not None
    assert found.t_o == pytest.approx(3 * T_O, rel=0.1)


def test_of_a_thousand_ranks_one_may_have_dropped_its_telemetry() -> None:
    estimator = Run()
    for number in range(10):
        for rank in range(40):
            if rank != number:
                estimator.observe(rank, step(number, first_bucket_s=0.02, sync_s=T_O, last_sync_s=T_U))
    assert estimator.estimate() is not None


def test_a_strategy_that_never_waits_has_a_gamma_and_no_communication() -> None:
    estimator = Run()
    for number in range(10):
        estimator.observe(0, step(number, first_bucket_s=0.03, sync_s=0.0, last_sync_s=0.0))
    found = estimator.estimate()
    assert found is not None
    assert (found.gamma, found.t_o, found.t_u, found.error_s) == (pytest.approx(0.3), 0, 0, 0)


def test_steps_not_measured_in_parts_say_nothing() -> None:
    estimator = Run()
    for number in range(10):
        estimator.observe(0, step(number, first_bucket_s=0.0, backward_s=0.0, sync_s=T_O, last_sync_s=T_U))
    assert estimator.estimate() is None


def test_only_so_many_steps_are_remembered() -> None:
    estimator = Run()
    told(estimator, random.Random(4), range(3 * PENDING_STEPS))
    assert len(estimator.overlap._syncs) == PENDING_STEPS
