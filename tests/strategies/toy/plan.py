from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import ADJUSTABLE, Declared, PlanParameters
from atoll.strategies.toy.settings import Toy


class ToyPlan(PlanParameters):
    strength: Annotated[float | None, Field(ge=0, le=1), ADJUSTABLE] = None


class ToyMessage(Declared):
    question: int | None = None
    answer: int | None = None


class ToyScheduler:
    """Multiplies what it is asked by the rounds of the game, for both players."""

    def __init__(self, settings: Toy) -> None:
        self._rounds = settings.rounds

    def heard(self, rank: int, message: ToyMessage, now_s: float) -> Iterable[tuple[int, ToyMessage]]:
        answer = ToyMessage(answer=self._rounds * (message.question or 0))
        return [(rank, answer), (1 - rank, answer)]

    due_s = None

    def passed(self, now_s: float) -> Iterable[tuple[int, ToyMessage]]:
        return []

    def take_notices(self, now_s: float) -> Iterable[str]:
        return [f"asked at {now_s:g} s"]
