"""Who decides: given what is known of a run, the next plan or none. The baselines that know the least are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from atoll.controller.estimators.profile import Profile
from atoll.controller.planners.bounds import Bounds
from atoll.controller.planners.inverse_time import InverseTimeInput, split_by_inverse_time
from atoll.controller.planners.surrogate import Surrogate

GAIN: Final = 0.02
"""A new plan must promise to shorten the time by this part at least, or noise would move batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy wants: samples of each rank, rate of strategy stale-sparse, the step's predicted seconds (0 where
    it predicts none)."""

    batches: tuple[int, ...]
    rate: float
    planner: str
    reason: str
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """current: the newest plan, whose number is `plan`, in force or not. candidates: total batches to choose from.
    surrogate: with strategy stale-sparse. samples: what is still to be trained. bounds, islands: by rank."""

    now_s: float
    newest_step: int
    plan: int
    current: Choice
    profile: Profile
    bounds: tuple[Bounds, ...]
    islands: tuple[str, ...]
    entries: int
    initial_batch: int
    candidates: tuple[int, ...]
    rule: str
    surrogate: Surrogate | None
    samples: float

    def measured(self) -> tuple[float, ...] | None:
        """Seconds that each rank computes under the newest plan; None before all were measured."""
        ranks = self.profile.ranks
        rows = [ranks.get(rank) for rank in range(len(self.bounds))]
        if any(row is None or row.plan != self.plan or row.compute_s <= 0 or row.local_batch <= 0 for row in rows):
            return None
        return tuple(row.compute_s for row in rows if row is not None)


class Policy(Protocol):
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


class InverseTime:
    """Cannikin (2024), Eq. 8, again and again: shares by the time per sample at the present split."""

    splits_evenly = False

    def decide(self, given: Situation) -> Choice | None:
        times = given.measured()
        return None if times is None else by_inverse_time(given, times)


def by_inverse_time(given: Situation, times: Sequence[float]) -> Choice | None:
    """None where it would not shorten the slowest rank's computing by more than GAIN."""
    before = given.current.batches
    per_sample = tuple(seconds / batch for seconds, batch in zip(times, before, strict=True))
    planned = split_by_inverse_time(InverseTimeInput(sum(before), per_sample, given.bounds))
    if planned.step_time > (1 - GAIN) * max(times):
        return None
    reason = f"slowest rank computes {max(times):.3g} s, {planned.step_time:.3g} s predicted"
    return Choice(batches=planned.batches, rate=given.current.rate, planner="inverse-time", reason=reason)


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
            rate=given.current.rate,
            planner="lb-bsp",
            reason=f"{moved} samples moved from slow to fast ranks",
        )
