"""Whole runs of strategy stale-sparse: real worker processes, their own sockets between them. Each test is a story."""

from __future__ import annotations

import pytest
from zmq_agent import free_port, torchrun_like

pytestmark = pytest.mark.timeout(120)


def ports(count: int) -> str:
    return ",".join(str(free_port()) for _ in range(count))


@pytest.mark.parametrize("world_size", [2, 3])
def test_when_nothing_is_left_out_or_late_it_trains_what_dense_trains(world_size: int) -> None:
    """Each of ten cases twice in the same processes: momentum, Adam, weight decay, groups, a schedule, tied and frozen
    parameters, accumulation, clipping, channels last. Losses, weights and moments agree to rounding."""
    assert torchrun_like("stale_equals_dense.py", ports(20), world_size=world_size) == [0] * world_size
