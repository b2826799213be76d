"""The outcome of simulating a policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.controller.simulator.joining import Verdict
from atoll.controller.simulator.policies import Choice
from atoll.controller.simulator.strategy_steps import Params


@dataclass(slots=True, kw_only=True)
class PlanLog:
    """A plan and what came of it. run: 1, and one more whenever the ranks changed. at_s: when it was decided; steps
    from `from_step` on have it. exact_s: its step without noise when it came into force; optimum_s: that of the best
    split of the same total, 0 where it is not known. seconds: of each of its steps."""

    run: int
    plan: int
    at_s: float
    from_step: int
    choice: Choice
    exact_s: float = 0.0
    optimum_s: float = 0.0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Point:
    """After a step."""

    now_s: float
    progress: float
    step_s: float
    total_batch: int
    params: Params


@dataclass(frozen=True, slots=True)
class Outcome:
    """ended: why; "target reached" is how it should. samples: trained; progress: what they were worth."""

    policy: str
    ended: str
    seconds: float
    steps: int
    progress: float
    samples: int
    plans: tuple[PlanLog, ...]
    points: tuple[Point, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def reached(self) -> bool:
        return self.ended == "target reached"
