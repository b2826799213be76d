from __future__ import annotations

import pytest
from simulated_links import trained

from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import PROFILE_STEPS, IdleSpans


def test_there_is_no_profile_before_twenty_steps() -> None:
    spans = IdleSpans()
    trained(spans, PROFILE_STEPS - 1, 0.3)
    assert (spans.profile(), spans.expected_s()) == ((), None)


def test_each_span_of_a_step_is_known_by_its_place() -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.3, 0.02, 0.05)
    assert spans.profile() == pytest.approx((0.3, 0.02, 0.05))
    assert spans.idle_since_s == now_s
    assert (spans.expected_s(), spans.is_longest()) == (pytest.approx(0.3), True)
    spans.busy(now_s + 0.3)
    assert spans.idle_since_s is None
    spans.idle(now_s + 0.31)
    assert (spans.expected_s(), spans.is_longest()) == (pytest.approx(0.02), False)


def test_a_step_with_other_spans_than_most_changes_nothing() -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.3)
    trained(spans, 3, 0.1, 0.1, 0.1, begin_s=now_s)
    assert spans.profile() == pytest.approx((0.3,))


def test_spans_that_become_shorter_are_known_soon_and_longer_ones_later() -> None:
    spans = IdleSpans()
    now_s = trained(spans, PROFILE_STEPS, 0.3)
    now_s = trained(spans, PROFILE_STEPS // 4 + 1, 0.1, begin_s=now_s)
    assert spans.profile() == pytest.approx((0.1,))
    now_s = trained(spans, PROFILE_STEPS // 2, 0.3, begin_s=now_s)
    assert spans.profile() == pytest.approx((0.1,))
    trained(spans, PROFILE_STEPS // 2, 0.3, begin_s=now_s)
    assert spans.profile() == pytest.approx((0.3,))


def test_a_step_without_an_exchange_is_none() -> None:
    """Between two epochs, or where a batch is shown again."""
    spans = IdleSpans()
    trained(spans, PROFILE_STEPS, 0.3)
    for _ in range(PROFILE_STEPS):
        spans.boundary()
    assert spans.profile() == pytest.approx((0.3,))
