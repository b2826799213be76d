"""The order of passes of a stage: one forward, one backward (1F1B). Pure.

Source: Narayanan et al., PipeDream, 2019, section 3.2, with its flush after each batch: a stage goes so many forward
passes ahead as there are stages behind it, and keeps activations of no more micro-batches than that."""

from __future__ import annotations

from enum import Enum


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[Direction, int]]:
    """Each micro-batch once in each direction, by number. Of M stages and m micro-batches of equal passes each stage
    idles (M - 1) / (m + M - 1) of the time."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [(Direction.FORWARD, micro) for micro in range(ahead)]
    for micro in range(micro_batches - ahead):
        order += [(Direction.FORWARD, ahead + micro), (Direction.BACKWARD, micro)]
    return order + [(Direction.BACKWARD, micro) for micro in range(micro_batches - ahead, micro_batches)]
