"""Step times of strategy `stale-sparse`: the period of steps with staleness 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES, UpdateTraffic
from atoll.controller.simulator.cluster import Link
from atoll.controller.simulator.steps import Computing, Network, Timed
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.simulate import StaleSparseSteps


def steps(*island_of: str, entries: int) -> StaleSparseSteps:
    learning = SimpleNamespace(extra=None)
    scenario = SimpleNamespace(strategy_settings=StaleSparse(values="float16"), learning=learning)
    cluster = SimpleNamespace(entries=entries, scenario=scenario)
    return StaleSparseSteps(cast(Any, cluster), island_of, 0.0)


def step(rounds: StaleSparseSteps, computing: Computing, sparsity: float, links: dict[str, Link]) -> Timed:
    return rounds.step(computing, {"sparsity": sparsity}, Network(0.0, links), np.random.default_rng(0))


@pytest.mark.parametrize("mbit_s", [1.0, 20.0, 1000.0])
def test_steps_with_staleness_1_settle_to_the_longer_of_computing_and_sending(mbit_s: float) -> None:
    entries, sparsity = 10_000_000, 0.99
    links = {"a": Link.constant(mbit_s), "b": Link.constant(2 * mbit_s)}
    rounds = steps("a", "a", "b", entries=entries)
    computing = Computing(np.array([0.02, 0.01, 0.03]), np.array([0.04, 0.02, 0.05]))
    ends = [step(rounds, computing, sparsity, links).ends_s for _ in range(40)]
    traffic = UpdateTraffic(
        entries, VALUE_BYTES["float16"], np.array([2 / 3, 1 / 3]), np.array([mbit_s, 2 * mbit_s]) * 125_000
    )
    assert ends[-1] - ends[-2] == pytest.approx(max(0.08, traffic.seconds(1 - sparsity)), rel=1e-9)


def test_at_sparsity_0_each_island_sends_all_of_its_own_update() -> None:
    links = {"a": Link.constant(100), "b": Link.constant(100)}
    rounds = steps("a", "a", "b", entries=1_000_000)
    computing = Computing(np.array([0.02] * 3), np.array([0.04] * 3), np.array([0.1] * 3))
    exact = step(rounds, computing, 0.0, links)
    sparse = step(rounds, computing, 1e-4, links)
    assert exact.sent_J == pytest.approx([2_062_500] * 2, rel=1e-3)
    assert sparse.sent_J == pytest.approx([2_062_500 * 2 / 3, 2_062_500 / 3], rel=1e-3)
    assert (exact.exchange_N[0], sparse.exchange_N[0]) == (
        pytest.approx(0.3),
        pytest.approx(0.1, rel=1e-3),
    )


def test_a_thin_link_is_always_busy_and_everyone_waits() -> None:
    links = {"a": Link.constant(1), "b": Link.constant(1)}
    rounds = steps("a", "b", entries=10_000_000)
    computing = Computing(np.array([0.01, 0.01]), np.array([0.02, 0.02]))
    timed = [step(rounds, computing, 0.99, links) for _ in range(20)]
    last = timed[-1]
    assert last.busy_J == pytest.approx(last.step_N, rel=1e-6)
    assert last.sent_J / last.busy_J == pytest.approx([125_000, 125_000])
    assert (last.stall_N > 0.9 * last.step_N).all()


def test_one_island_sends_nothing_and_waits_for_nobody() -> None:
    rounds = steps("a", "a", entries=1000)
    computing = Computing(np.array([0.01, 0.02]), np.array([0.02, 0.04]))
    timed = [step(rounds, computing, 0.9, {}) for _ in range(5)][-1]
    assert timed.sent_J.tolist() == [0]
    assert timed.step_N.tolist() == pytest.approx([0.06, 0.06])
