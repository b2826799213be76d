"""1F1B: complete, without deadlock, and idle as little as it can be."""

from __future__ import annotations

import pytest

from atoll.agent.runtime.pipeline.schedule import Direction, after_last_forward, until_last_forward


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
@pytest.mark.parametrize(("batches", "ahead"), [(1, False), (3, False), (3, True)])
def test_equal_stages_idle_as_long_as_the_formula_says(
    stages: int, micro_batches: int, batches: int, ahead: bool
) -> None:
    """Carried out in simulated time, passes of 1 and 2 s: each stage ends a batch by (m + M - 1)·3 s, and never holds
    more micro-batches than there are stages from it on. Where the next batch is known before one is over, all of them
    together idle as long as one does."""
    orders = [order(stage, stages, micro_batches, batches, ahead=ahead) for stage in range(stages)]
    ended: dict[tuple[Direction, int, int, int], float] = {}  # direction, stage, batch, micro-batch
    free_s, places = [0.0] * stages, [0] * stages
    while any(places[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage, passes in enumerate(orders):
            if places[stage] == len(passes):
                continue
            direction, batch, micro = passes[places[stage]]
            forward = direction is Direction.FORWARD
            before = stage - 1 if forward else stage + 1
            ready_s = ended.get((direction, before, batch, micro)) if 0 <= before < stages else 0.0
            if ready_s is None:
                continue
            free_s[stage] = max(free_s[stage], ready_s) + (1 if forward else 2)
            ended[direction, stage, batch, micro] = free_s[stage]
            places[stage], moved = places[stage] + 1, True
            held = sum(1 if way is Direction.FORWARD else -1 for way, _, _ in passes[: places[stage]])
            assert held <= stages - stage
        assert moved
    once = stages - 1 if ahead and micro_batches >= stages else batches * (stages - 1)
    if ahead and micro_batches < stages:  # too few to be at work all the time
        assert free_s[0] <= 3 * (batches * micro_batches + once)
    else:
        assert free_s[0] == max(free_s) == 3 * (batches * micro_batches + once)


def order(
    stage: int, stages: int, micro_batches: int, batches: int, *, ahead: bool
) -> list[tuple[Direction, int, int]]:
    """All passes of a stage, with their batch."""
    found, made = [], 0
    for batch in range(batches):
        found += [(way, batch, micro) for way, micro, _ in until_last_forward(stage, stages, micro_batches, made)]
        rest = after_last_forward(stage, stages, micro_batches, micro_batches if ahead and batch + 1 < batches else 0)
        found += [(one.direction, batch + one.ahead, one.micro) for one in rest]
        made = sum(one.ahead for one in rest)
    assert sorted(found, key=str) == sorted(
        ((way, batch, micro) for way in Direction for batch in range(batches) for micro in range(micro_batches)),
        key=str,
    )
    return found
