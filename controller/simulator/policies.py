"""Policies: given what is known of a run, the next plan or none. Baselines that know little are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from atoll.controller.estimators.profile import Profile
from atoll.controller.planners.batches.bounds import Bounds
from atoll.controller.planners.surrogate import Surrogate
from atoll.controller.simulator.strategy_steps import Params

GAIN: Final = 0.02
"""Baselines leave a plan alone that is within this part of the best they know of, or noise would move batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy wants: samples of each rank, what the plan tells the strategy, the step's predicted seconds (0
    where it predicts none)."""

    batches: tuple[int, ...]
    params: Params
    planner: str
    reason: str
    predicted_s: float = 0.0
    learning_rate_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """current: the newest plan, whose number within the run is `plan`, in force or not, decided at planned_s.
    candidates: total batches to choose from, ascending. surrogate: where the scenario has one. bounds, islands: by
    rank."""

    now_s: float
    planned_s: float
    run: int
    plan: int
    current: Choice
    profile: Profile
    bounds: tuple[Bounds, ...]
    islands: tuple[str, ...]
    initial_batch: int
    candidates: tuple[int, ...]
    rule: str
    surrogate: Surrogate | None

    def measured(self) -> tuple[float, ...] | None:
        """Seconds that each rank computes under the newest plan; None before all were measured."""
        ranks = self.profile.ranks
        known = [ranks[rank] for rank in range(len(self.bounds)) if rank in ranks and ranks[rank].plan == self.plan]
        return tuple(rank.compute_s for rank in known) if len(known) == len(self.bounds) else None


class SimulatedPolicy(Protocol):
    """One for each simulated job: it may remember. splits_evenly: whatever is known of the devices."""

    splits_evenly: bool

    def decide(self, given: Situation) -> Choice | None:
        """The plan that should follow `given.current`; None while that is good enough or too little is known."""
        ...


class Even:
    """The same for every rank, for ever: DistributedDataParallel."""

    splits_evenly = True

    def decide(self, given: Situation) -> Choice | None:
        return None


class Pinned:
    """As Even, and from the first decision on plans tell the strategy always the same."""

    splits_evenly = True

    def __init__(self, params: Params, reason: str) -> None:
        self._params, self._reason = params, reason

    def decide(self, given: Situation) -> Choice | None:
        if given.current.params == self._params:
            return None
        return Choice(batches=given.current.batches, params=self._params, planner="pinned", reason=self._reason)


class LbBsp:
    """LB-BSP (Chen et al., 2020) as Cannikin compares with it: at each decision up to `step` samples move from a slow
    rank to a fast one: the slowest to the fastest, the second slowest to the second fastest, and so on.

    Kinder than a fixed step: a move never overshoots the point where both would compute equally long.
    """

    splits_evenly = False

    def __init__(self, step: int = 5) -> None:
        self._step = step

    def decide(self, given: Situation) -> Choice | None:
        times = given.measured()
        if times is None:
            return None
        batches = list(given.current.batches)
        order = sorted(range(len(batches)), key=lambda rank: (times[rank], rank))
        moved = 0
        for fast, slow in zip(order, reversed(order), strict=True):
            if times[slow] <= (1 + GAIN) * times[fast]:
                break
            slope = times[slow] / batches[slow] + times[fast] / batches[fast]
            count = min(self._step, round((times[slow] - times[fast]) / slope))
            count = min(count, batches[slow] - given.bounds[slow].min_batch)
            count = min(count, int(given.bounds[fast].ceiling(sum(batches))) - batches[fast])
            if count > 0:
                batches[slow], batches[fast], moved = batches[slow] - count, batches[fast] + count, moved + count
        if not moved:
            return None
        return Choice(
            batches=tuple(batches),
            params=given.current.params,
            planner="lb-bsp",
            reason=f"{moved} samples moved from slow to fast ranks",
        )
