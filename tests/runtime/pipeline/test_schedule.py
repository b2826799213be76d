"""1F1B: complete, without deadlock, and idle as little as it can be."""

from __future__ import annotations

import pytest

from atoll.agent.runtime.pipeline.schedule import Direction, one_forward_one_backward


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_equal_stages_idle_as_long_as_the_formula_says(stages: int, micro_batches: int) -> None:
    """Carried out in simulated time, passes of 1 and 2 s: each stage ends by (m + M - 1)·3 s, and never holds more
    micro-batches than there are stages from it on."""
    orders = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    ended: dict[tuple[Direction, int, int], float] = {}  # direction, stage, micro-batch
    free_s, places = [0.0] * stages, [0] * stages
    while any(places[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            direction, micro = order[places[stage]]
            forward = direction is Direction.FORWARD
            before = stage - 1 if forward else stage + 1
            ready_s = ended.get((direction, before, micro)) if 0 <= before < stages else 0.0
            if ready_s is None:
                continue
            free_s[stage] = max(free_s[stage], ready_s) + (1 if forward else 2)
            ended[direction, stage, micro] = free_s[stage]
            places[stage], moved = places[stage] + 1, True
            held = sum(1 if way is Direction.FORWARD else -1 for way, _ in order[: places[stage]])
            assert held <= stages - stage
        assert moved
    assert free_s[0] == max(free_s) == 3 * (micro_batches + stages - 1)
