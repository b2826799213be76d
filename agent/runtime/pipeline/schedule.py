"""The order of passes of a stage: one forward, one backward (1F1B). Pure.

Source: Narayanan et al., PipeDream, 2019, section 3.2: a stage goes so many forward passes ahead as there are stages
behind it, and keeps activations of no more micro-batches than that. Where the next batch is known before this one's
last backward passes, their places between are its first forward passes; else the pipeline is flushed."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class MicroPass(NamedTuple):
    """ahead: of the batch after this one."""

    direction: Direction
    micro: int
    ahead: bool = False


def until_last_forward(stage: int, stages: int, micro_batches: int, made: int = 0) -> list[MicroPass]:
    """Return the passes of a batch up to its last forward pass. made: forward passes made ahead."""
    ahead = _ahead(stage, stages, micro_batches)
    order = [MicroPass(Direction.FORWARD, micro) for micro in range(ahead)]
    for micro in range(micro_batches - ahead):
        order += [MicroPass(Direction.FORWARD, ahead + micro), MicroPass(Direction.BACKWARD, micro)]
    return [one for one in order if one.direction is Direction.BACKWARD or one.micro >= made]


def after_last_forward(stage: int, stages: int, micro_batches: int, following: int = 0) -> list[MicroPass]:
    """The rest. following: micro-batches of the next batch; 0: it is not known. Without it, of M stages and m
    micro-batches of equal passes each stage idles (M - 1) / (m + M - 1) of the time."""
    ahead = _ahead(stage, stages, micro_batches)
    order = []
    for number in range(ahead):
        if number < following:
            order.append(MicroPass(Direction.FORWARD, number, ahead=True))
        order.append(MicroPass(Direction.BACKWARD, micro_batches - ahead + number))
    return order


def _ahead(stage: int, stages: int, micro_batches: int) -> int:
    return min(stages - stage - 1, micro_batches)
