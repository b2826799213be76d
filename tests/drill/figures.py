"""Computes the cost of strikes: when they were noticed, when training went on, what was lost. Pure.

Times are wall clock readings of one machine, taken by the drill, the controllers and the ranks."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from drill.evidence import Evidence, Incarnation
from drill.schedule import Hit

_STOP_S: Final = 120.0
"""A run that begins later than this after a strike has another cause."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """A hit, and when a controller said so; None where nobody has to (an etcd member), or nobody did."""

    hit: Hit
    at_s: float | None


@dataclass(frozen=True, slots=True)
class StrikeCost:
    """What one strike cost. Seconds after it; None where it did not happen before the end."""

    hit: Hit
    detection_s: float | None
    training_s: float | None
    """Until the first step was done that had never been done before."""
    steps_lost: int
    """That were done and had to be done again."""
    interrupted: bool
    """Whether it ended a run, or a view of one."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some seconds, or steps."""

    count: int
    median: float
    p90: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None of nothing. p90: the least value that 90 % do not exceed."""
        ordered = sorted(values)
        if not ordered:
            return None
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(len(ordered), statistics.median(ordered), p90, ordered[-1])


def recoveries(evidence: Evidence, noticed: Sequence[Noticed]) -> list[StrikeCost]:
    """Of each strike, in order of time.

    A line says that a step begins, so that the one before it is done. A strike ended a run, or a view of one, if a
    newer one began after it and before the next strike did (or, where strikes came together, after both: then it counts
    for each)."""
    lines = sorted(evidence.begun, key=lambda one: one.at_s)
    times = [one.at_s for one in lines]
    began: dict[Incarnation, float] = {}
    for one in lines:
        began.setdefault(one.run, one.at_s)
    found = []
    for hit, at_s in sorted(((one.hit, one.at_s) for one in noticed), key=lambda one: one[0].at_s):
        before = lines[: bisect_right(times, hit.at_s)]
        run = max((one.run for one in before), default=Incarnation(0))
        newer = [other for other, began_s in began.items() if other > run and began_s - hit.at_s < _STOP_S]
        own = min(newer, default=None) if hit.strike.takes_workers else None
        detection_s = at_s - hit.at_s if at_s is not None else None
        reached = max((one.step for one in (lines if own is not None else before) if one.run <= run), default=-1)
        rest = lines[len(before) :]
        later = (one.at_s for one in rest if one.step > reached and (own is None or one.run >= own))
        again_s = next(later, None)
        lost = max(0, reached - evidence.spans[own][0]) if own is not None else 0
        training_s = again_s - hit.at_s if again_s is not None else None
        found.append(StrikeCost(hit, detection_s, training_s, lost, own is not None))
    return found


def effective_ratio(evidence: Evidence, began_s: float, ended_s: float) -> float:
    """Time in steps that count over wall time: steps first begun within [began_s, ended_s], each as long as the
    median of those steps whose successor is of the same run and rank."""
    first: dict[int, float] = {}
    for one in evidence.begun:
        first[one.step] = min(one.at_s, first.get(one.step, math.inf))
    counted = sum(began_s <= at_s < ended_s for at_s in first.values())
    took = median_step_s(evidence, began_s, ended_s)
    return counted * took / (ended_s - began_s) if ended_s > began_s else 0.0


def median_step_s(evidence: Evidence, began_s: float, ended_s: float) -> float:
    at = {(one.run, one.rank, one.step): one.at_s for one in evidence.begun if began_s <= one.at_s < ended_s}
    took = [at[run, rank, step + 1] - at_s for (run, rank, step), at_s in at.items() if (run, rank, step + 1) in at]
    return statistics.median(took) if took else 0.0
