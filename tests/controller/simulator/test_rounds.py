"""Step times: Eq. 7 for dense, and the period of steps with staleness 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.controller.planners.optperf import NodeModel, Overlap, step_times
from atoll.controller.planners.wire_bytes import Traffic
from atoll.controller.simulator.devices import Computing, Cost
from atoll.controller.simulator.links import Link
from atoll.controller.simulator.rounds import VALUE_BYTES, SparseRounds, dense_step, ring_overlap

SECONDS = st.floats(1e-4, 1.0)


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8),
    st.floats(0, 1),
    SECONDS,
    SECONDS,
)
def test_a_dense_step_takes_what_equation_7_says(
    parts: list[tuple[float, float]], gamma: float, t_o: float, t_u: float
) -> None:
    before, backward = (np.array(column) for column in zip(*parts, strict=True))
    overlap = Overlap(gamma=gamma, t_o=t_o, t_u=t_u)
    timed = dense_step(Computing(before, backward), overlap, 10.0, 1)
    nodes = [NodeModel(q=1e-9, s=a, k=1e-9, m=p) for a, p in parts]
    expected = float(step_times(nodes, overlap).at(np.zeros(len(parts))).max())
    assert timed.ends_s - 10 == pytest.approx(expected, rel=1e-6)
    # What a rank counts includes waiting for others; the rank that came last waited for nobody.
    assert timed.sync_N.min() == pytest.approx(t_o)
    assert (timed.last_sync_N >= t_u * (1 - 1e-9)).all()
    assert (timed.step_N == timed.ends_s - 10).all() or timed.step_N == pytest.approx(timed.ends_s - 10)


def test_a_ring_sends_each_entry_nearly_twice() -> None:
    seconds, last = ring_overlap(25_000_000, 25e6, 4, 1000)
    assert seconds == pytest.approx(2 * 3 / 4 * 100e6 / 125e6)
    assert last == pytest.approx(0.25)
    assert ring_overlap(1000, 25e6, 4, 1000)[1] == 1


def test_a_saturated_device_takes_no_less_for_fewer_samples() -> None:
    cost = Cost.saturating(alpha=20, beta=99)
    assert (cost.q + cost.k) * cost.floor == pytest.approx(20 / 99)


@pytest.mark.parametrize("mbit_s", [1.0, 20.0, 1000.0])
def test_steps_with_staleness_1_settle_to_the_longer_of_computing_and_sending(mbit_s: float) -> None:
    entries, rate = 10_000_000, 0.99
    links = {"a": Link.constant(mbit_s), "b": Link.constant(2 * mbit_s)}
    rounds = SparseRounds(np.array([0, 0, 1]), ["a", "b"], 0.0)
    computing = Computing(np.array([0.02, 0.01, 0.03]), np.array([0.04, 0.02, 0.05]))
    ends = [rounds.step(computing, links, entries, rate).ends_s for _ in range(40)]
    traffic = Traffic(entries, VALUE_BYTES, np.array([2 / 3, 1 / 3]), np.array([mbit_s, 2 * mbit_s]) * 125_000)
    assert ends[-1] - ends[-2] == pytest.approx(max(0.08, traffic.seconds(1 - rate)), rel=1e-9)


def test_a_thin_link_is_always_busy_and_everyone_waits() -> None:
    links = {"a": Link.constant(1), "b": Link.constant(1)}
    rounds = SparseRounds(np.array([0, 1]), ["a", "b"], 0.0)
    computing = Computing(np.array([0.01, 0.01]), np.array([0.02, 0.02]))
    timed = [rounds.step(computing, links, 10_000_000, 0.99) for _ in range(20)]
    last = timed[-1]
    assert last.busy_J == pytest.approx(last.step_N, rel=1e-6)
    assert last.sent_J / last.busy_J == pytest.approx([125_000, 125_000])
    assert (last.stall_N > 0.9 * last.step_N).all()


def test_one_island_sends_nothing_and_waits_for_nobody() -> None:
    rounds = SparseRounds(np.array([0, 0]), ["a"], 0.0)
    computing = Computing(np.array([0.01, 0.02]), np.array([0.02, 0.04]))
    timed = [rounds.step(computing, {}, 1000, 0.9) for _ in range(5)][-1]
    assert timed.sent_J.tolist() == [0]
    assert timed.step_N.tolist() == pytest.approx([0.06, 0.06])
