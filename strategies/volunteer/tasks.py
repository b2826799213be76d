"""Tasks that a pool hands out, who made which activations, and why an answer did not count."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.agent.runtime.pipeline.schedule import Direction


class Refusal(StrEnum):
    """Reasons for which an answer is refused."""

    STRANGER = "no client"
    OLD_STEP = "of an old step"
    UNKNOWN = "no such task"
    ANOTHERS = "another's task"
    TWICE = "answered before"
    DONE = "done by another"
    WRONG = "of wrong content"


@dataclass(frozen=True, slots=True)
class Task:
    """Samples [begin, end) of a micro-batch. made_here: the client made the activations whose gradients these are; if
    not, it needs the stage's input and computes them again."""

    number: int
    micro: int
    direction: Direction
    begin: int
    end: int
    made_here: bool = False

    @property
    def samples(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Made:
    """An entry of the backward servers' list: who made the activations of samples [begin, end), in one task; None where
    that one has left, and has them no more."""

    client: str | None
    begin: int
    end: int
