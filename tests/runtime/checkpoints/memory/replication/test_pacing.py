from __future__ import annotations

import pytest
from simulated_links import Link, trained

from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import (
    PROFILE_STEPS,
    USABLE_SHARE,
    IdleSpans,
    allowance,
    overdue,
)
from atoll.agent.runtime.checkpoints.memory.replication.path_model import PathModel

BANDWIDTH = 119e6


@pytest.fixture
def path() -> PathModel:
    """A link of 1 Gbit/s that was measured."""
    made = PathModel()
    link = Link(BANDWIDTH, 0.0005)
    for _ in range(3):
        link.copy(made, int(BANDWIDTH))
    return made


def test_what_fits_into_the_span_may_leave(path: PathModel) -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.1)
    most = USABLE_SHARE * 0.1 * BANDWIDTH
    assert 0.85 * most < allowance(spans, path, 10**9, now_s) <= 1.05 * most
    assert allowance(spans, path, 1000, now_s) == max(1000, path.chunk_bytes)


def test_a_copy_that_is_ready_late_has_the_rest_of_the_span(path: PathModel) -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.1)
    most = (USABLE_SHARE * 0.1 - 0.05) * BANDWIDTH
    assert 0.8 * most < allowance(spans, path, 10**9, now_s + 0.05) <= 1.05 * most


def test_nothing_leaves_while_links_are_busy_or_in_a_gap_too_short_for_a_byte(path: PathModel) -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.1, 1e-6)
    spans.busy(now_s + 0.1)
    assert allowance(spans, path, 10**9, now_s + 0.1) == 0
    spans.idle(now_s + 0.11)
    assert allowance(spans, path, 10**9, now_s + 0.11) == 0


def test_where_training_leaves_no_time_a_chunk_goes_in_the_longest_gap(path: PathModel) -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 1e-5, 1e-6)
    assert allowance(spans, path, 10**9, now_s) == path.chunk_bytes


def test_until_links_and_spans_are_known_there_is_no_limit(path: PathModel) -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS - 1, 0.1)
    assert allowance(spans, path, 10**9, now_s) >= 10**9
    now_s = trained(spans, 1, 0.1, begin_s=now_s)
    assert allowance(spans, PathModel(), 10**9, now_s) >= 10**9


def test_a_span_that_lasts_longer_than_ever_is_no_span_of_a_step(path: PathModel) -> None:
    """The script evaluates, or waits for something."""
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.1)
    assert not overdue(spans, now_s + 0.2)
    assert overdue(spans, now_s + 0.3)
    assert allowance(spans, path, 10**9, now_s + 0.3) >= 10**9
