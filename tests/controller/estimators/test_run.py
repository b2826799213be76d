from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from atoll.controller.estimators.bandwidth import ObservedLink
from atoll.controller.estimators.run import RunEstimators
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.rank import NEEDED_STEPS, SKIPPED_STEPS

SPEEDS = (1.0, 0.6, 0.3)


class Cluster:
    """Three ranks of unequal speed; every rank tells its steps five at a time."""

    def __init__(self, noise: float = 0.0) -> None:
        self.run = RunEstimators()
        self.step = 0
        self.speeds = list(SPEEDS)
        self._noise, self._rng = noise, random.Random(1)

    def compute_s(self, rank: int, batch: int) -> float:
        return (0.006 * batch + 0.03) / self.speeds[rank]

    def train(self, plan: int, batches: tuple[int, ...], steps: int, total_batch: int = 0) -> None:
        total = total_batch or sum(batches)
        seen: list[list[ObservedStep]] = [[] for _ in batches]
        for _ in range(steps):
            computed = [
                self.compute_s(rank, b) * self._rng.lognormvariate(0, self._noise) for rank, b in enumerate(batches)
            ]
            slowest = max(computed)
            for rank, c in enumerate(computed):
                seen[rank].append(
                    ObservedStep(
                        step=self.step, plan=plan, local_batch=batches[rank], total_batch=total, step_s=slowest + 0.01,
                        compute_s=c, load_s=0.05 * c, forward_s=0.3 * c, backward_s=0.6 * c, first_bucket_s=0.12 * c,
                        update_s=0.05 * c, sync_s=0.02 + slowest - c, last_sync_s=0.01,
                    )
                )  # fmt: skip
            self.step += 1
        for start in range(0, steps, 5):
            for rank, told in enumerate(seen):
                for one in told[start : start + 5]:
                    self.run.observe(rank, one)


def test_from_steps_to_profile() -> None:
    """1. An even split. 2. A split by speed. 3. All that a planner asks for is known."""
    cluster = Cluster(noise=0.02)
    cluster.train(1, (40, 40, 40), 20)
    first = cluster.run.profile()
    assert (first.plan, first.total_batch, first.newest_step) == (1, 120, 19)
    assert [first.ranks[rank].estimate for rank in range(3)] == [None, None, None]
    assert first.step_s == pytest.approx(cluster.compute_s(2, 40) + 0.01, rel=0.03)

    cluster.train(2, (64, 38, 18), 20)
    cluster.run.observe_entries(1000)
    found = cluster.run.profile()
    assert (found.plan, found.total_batch, found.newest_step, found.entries) == (2, 120, 39, 1000)
    for rank, batch in enumerate((64, 38, 18)):
        profile = found.ranks[rank]
        assert (profile.plan, profile.local_batch, profile.steps) == (2, batch, 20)
        assert profile.compute_s == pytest.approx(cluster.compute_s(rank, batch), rel=0.03)
        assert 0 < profile.compute_error_s < 0.02 * profile.compute_s
        assert [point.local_batch for point in profile.points] == sorted({40, batch})
    for rank in (0, 2):
        estimate = found.ranks[rank].estimate
        assert estimate is not None
        assert estimate.compute_s(30) == pytest.approx(cluster.compute_s(rank, 30), rel=0.07)
    assert found.overlap is not None
    assert found.overlap.gamma == pytest.approx(0.2)
    assert (found.overlap.t_o, found.overlap.t_u) == (pytest.approx(0.02), pytest.approx(0.01))


def test_nothing_seen_is_an_empty_profile() -> None:
    found = RunEstimators().profile()
    assert (found.plan, found.total_batch, found.step_s, found.ranks, found.links) == (0, 0, 0, {}, {})
    assert found.overlap is None
    assert found.noise is None


def test_the_first_steps_of_a_run_do_not_count_and_five_must_follow() -> None:
    cluster = Cluster()
    cluster.train(1, (40, 40, 40), SKIPPED_STEPS + NEEDED_STEPS - 1)
    assert cluster.run.profile().ranks == {}
    cluster.train(1, (40, 40, 40), 1)
    assert set(cluster.run.profile().ranks) == {0, 1, 2}


def test_a_new_plan_begins_a_new_window_but_not_a_new_model() -> None:
    cluster = Cluster()
    cluster.train(1, (40, 40, 40), 20)
    cluster.train(2, (60, 40, 20), NEEDED_STEPS - 1)
    assert cluster.run.profile().ranks == {}
    cluster.train(2, (60, 40, 20), 1)
    found = cluster.run.profile().ranks[0]
    assert (found.plan, found.steps) == (2, NEEDED_STEPS)
    assert found.estimate is not None


@pytest.mark.parametrize(("slower", "batches", "known"), [(20.0, (20, 20, 20), True), (1.0, (20, 20, 20), False),
    (20.0, (20, 30, 20), False)])  # fmt: skip
def test_after_one_long_step_of_a_plan_with_the_same_batches_ranks_are_known(
    slower: float, batches: tuple[int, ...], known: bool
) -> None:
    """A plan that only sends less must not stand for five steps of a minute where it still sends too much."""
    cluster = Cluster()
    cluster.speeds = [speed / slower for speed in SPEEDS]
    cluster.train(1, (20, 20, 20), 10)
    cluster.train(2, batches, 1, total_batch=60)
    assert (cluster.run.profile().plan, len(cluster.run.profile().ranks) == 3) == (2, known)


def test_an_epochs_short_last_batch_is_no_measure_of_the_plan() -> None:
    cluster = Cluster()
    cluster.train(1, (40, 40, 40), 20)
    cluster.train(1, (5, 5, 5), 1)
    cluster.train(1, (40, 40, 40), 2)
    found = cluster.run.profile()
    assert found.total_batch == 120
    assert (found.ranks[0].local_batch, found.ranks[0].steps) == (40, 20)
    assert found.ranks[0].compute_s == pytest.approx(cluster.compute_s(0, 40))


def test_a_second_load_on_one_device_is_in_the_profile_within_ten_steps() -> None:
    cluster = Cluster(noise=0.03)
    cluster.train(1, (40, 40, 40), 30)
    cluster.train(2, (64, 38, 18), 30)
    cluster.speeds[0] = 0.5
    cluster.train(2, (64, 38, 18), 10)
    found = cluster.run.profile()
    assert found.ranks[0].compute_s == pytest.approx(cluster.compute_s(0, 64), rel=0.07)
    assert found.step_s == pytest.approx(cluster.compute_s(0, 64) + 0.01, rel=0.07)
    estimate = found.ranks[0].estimate
    assert estimate is not None
    assert estimate.compute_s(40) == pytest.approx(cluster.compute_s(0, 40), rel=0.07)


SOUND = ObservedStep(step=99, plan=1, local_batch=40, total_batch=120, step_s=0.3, compute_s=0.27)


@pytest.mark.parametrize(
    "senseless",
    [
        replace(SOUND, compute_s=math.nan),
        replace(SOUND, compute_s=0.0),
        replace(SOUND, backward_s=math.inf),
        replace(SOUND, sync_s=-1.0),
        replace(SOUND, strategy_metrics={"stall_s": math.nan}),
        replace(SOUND, local_grad_sqnorm=-1.0),
        replace(SOUND, total_batch=0, local_batch=0),
        replace(SOUND, total_batch=20),
        replace(SOUND, step=3),
        replace(SOUND, step=19),
        replace(SOUND, plan=0),
    ],
)
def test_senseless_repeated_and_older_steps_change_nothing(senseless: ObservedStep) -> None:
    cluster = Cluster()
    cluster.train(1, (40, 40, 40), 20)
    before = cluster.run.profile()
    cluster.run.observe(0, senseless)
    cluster.run.observe(7, replace(senseless, compute_s=math.nan))
    assert cluster.run.profile() == before


def test_a_rank_that_is_behind_keeps_its_own_plan() -> None:
    cluster = Cluster()
    cluster.train(1, (40, 40, 40), 20)
    for step in range(20, 30):
        cluster.run.observe(0, replace(SOUND, step=step, plan=2, local_batch=60, step_s=0.5))
    found = cluster.run.profile()
    assert (found.plan, found.step_s, found.steps) == (2, 0.5, 10)
    assert [found.ranks[rank].plan for rank in range(3)] == [2, 1, 1]


def test_only_what_all_ranks_wait_for_cuts_the_estimate_of_a_link() -> None:
    """1. Rank 0 waits for the slower rank 1 a third of the time. 2. From second 20 on both wait."""
    run = RunEstimators()
    bandwidth = {}
    for second in range(40):
        for rank, stall_s in ((0, 0.3), (1, 0.3 if second >= 20 else 0.0)):
            for i in range(5):
                seen = replace(SOUND, step=5 * second + i, strategy_metrics={"stall_s": stall_s}, step_s=1.0)
                run.observe(rank, seen)
        link = ObservedLink(peer=1, sent_bytes=second * 5_000_000, busy_s=0.7 * second)
        run.observe_links(0, {0: "a", 1: "b"}, [link], float(second))
        bandwidth[second] = {name: link.bandwidth_bps for name, link in run.profile().links.items()}
    assert bandwidth[19]["a"] == pytest.approx(4e7 / 0.7, rel=0.01)
    assert bandwidth[39]["a"] < 0.8 * bandwidth[19]["a"]
