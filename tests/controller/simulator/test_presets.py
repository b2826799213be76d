from __future__ import annotations

import pytest

from atoll.controller.simulator.presets import Cost


def test_a_saturated_device_takes_no_less_for_fewer_samples() -> None:
    cost = Cost.saturating(alpha=20, beta=99)
    assert (cost.q + cost.k) * cost.floor == pytest.approx(20 / 99)
