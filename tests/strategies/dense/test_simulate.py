"""Step times of strategy `dense`: Cannikin (2024), Eq. 7."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.controller.planners.batches.optperf import NodeModel, Overlap, step_times
from atoll.controller.simulator.steps import Computing
from atoll.strategies.dense.simulate import dense_step, ring_overlap

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
    timed = dense_step(Computing(before, backward), overlap, 10.0)
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
