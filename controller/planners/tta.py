"""Compression rate and batches for the least time to accuracy over thin links between islands.

Source: StellaTrain (Lim et al., 2024), Eq. 1-6. Differences, all on purpose: Eq. 3 is taken as standard deviation
over mean (as printed its sums lack 1/n); Eq. 6 counts the bytes that really cross each island's link (values,
indices, copies) in place of the model's size; the balance term scales the time to accuracy, so its weight has no
unit. The time of a step depends on the batches only through the slowest device, so for each total the split that
makes it fastest is taken exactly, and Nelder-Mead searches over rate and total alone: two dimensions for any number
of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.controller.planners.bounds import Bounds
from atoll.controller.planners.surrogate import Surrogate
from atoll.controller.planners.water_filling import F64, Levels, StepTimes, whole
from atoll.controller.planners.wire_bytes import Traffic
from atoll.errors import NoFeasiblePlan

_STARTS: Final = 4
"""Along the range of the total batch: the surrogate, and with it the time to accuracy, may have several valleys."""
_EVALUATIONS: Final = 80
"""Of each start; two dimensions settle in fewer."""
_LEAST_STEP: Final = 0.2
"""However costly entries were, so much of a step's time stays without them."""
_CLOSER: Final = 4
"""Rounds in which a longer step carries more, and more makes it longer; each is feasible."""
_INFEASIBLE: Final = 1e3
"""Above the logarithm of any time to accuracy."""


@dataclass(frozen=True, slots=True)
class Device:
    """A batch of x takes max(per_sample_s x + fixed_s, floor_s) seconds."""

    per_sample_s: float
    fixed_s: float
    floor_s: float
    island: int
    bounds: Bounds

    @classmethod
    def saturating(cls, alpha: float, beta: float, island: int, bounds: Bounds) -> Device:
        """Eq. 2: throughput min(beta / alpha * x, beta) samples a second. alpha: samples that saturate it."""
        return cls(1 / beta, 0.0, alpha / beta, island, bounds)


@dataclass(frozen=True, slots=True)
class RateCost:
    """What devices take was measured at `rate`; where all entries are kept a step takes `seconds` longer than where
    none is: entries are selected, summed and applied."""

    seconds: float
    rate: float

    def step_s(self, compute_s: float, kept: float) -> float:
        return max(compute_s + self.seconds * (kept - 1 + self.rate), _LEAST_STEP * compute_s)


@dataclass(frozen=True, slots=True)
class TtaInput:
    """bandwidths: bytes a second of each island's link to the others, each way. entries: of the model. value_bytes:
    of an entry on the wire. balance: how much unequal times of the devices count; 0 leaves them out. samples: to be
    trained until the accuracy is reached with neither compression nor staleness. rate_cost: what more entries take of
    the devices' time. totals: the least and the largest
    total batch to choose from; None: what the surrogate knows."""

    devices: tuple[Device, ...]
    bandwidths: tuple[float, ...]
    entries: int
    surrogate: Surrogate
    samples: int
    value_bytes: int = 2
    balance: float = 0.1
    totals: tuple[int, int] | None = None
    rate_cost: RateCost = RateCost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TtaPlan:
    """rate: share of entries dropped. tta, step_time, communication_time: predicted seconds, the last two per step.
    extra: relative extra loss from the surrogate. variation: standard deviation over mean of the devices' times."""

    rate: float
    total_batch: int
    batches: tuple[int, ...]
    step_time: float
    communication_time: float
    throughput: float
    extra: float
    variation: float
    tta: float


def plan_tta(given: TtaInput) -> TtaPlan:
    """Minimise samples (1 + g(r, X)) / (X / T) (1 + balance CV) over rate r and batches x, X = sum x, T the slowest
    device's time, such that every link carries its bytes within T. Raises NoFeasiblePlan.
    """
    search = _Search(given)
    places: dict[int, float] = {}  # of the rate, by whole total: that of the best start that ended there
    for _, total, above in sorted(search.minima()):
        for whole_total in (math.floor(total), math.ceil(total)):
            places.setdefault(whole_total, above)
    found = [plan for total, above in places.items() if (plan := search.plan(total, above)) is not None]
    if not found:
        raise search.links_too_thin()
    return min(found, key=lambda plan: plan.tta * (1 + given.balance * plan.variation))


def assess_tta(given: TtaInput, rate: float, batches: Sequence[int]) -> TtaPlan:
    """What a rate and batches would do, where links may be too thin for them: then they set the step's time."""
    return _Search(given).assess(rate, batches)


class _Search:
    """A point is the total batch, and where the rate lies between the least the links allow (0) and the largest that
    was profiled (1)."""

    def __init__(self, given: TtaInput) -> None:
        self._given = given
        per_sample, fixed, floor = np.array(
            [(d.per_sample_s, d.fixed_s, d.floor_s) for d in given.devices], dtype=np.float64
        ).T
        slope, offset = np.stack([per_sample, np.zeros_like(floor)]), np.stack([fixed, floor])
        self._times = StepTimes.of(slope, offset, [d.bounds for d in given.devices])
        self._levels = Levels(self._times)
        devices = np.bincount([d.island for d in given.devices], minlength=len(given.bandwidths))
        self._traffic = Traffic(
            given.entries, given.value_bytes, devices / devices.sum(), np.array(given.bandwidths, dtype=np.float64)
        )
        self._most_kept = 1 - given.surrogate.rates[0]
        self._least_kept = 1 - given.surrogate.rates[-1]
        known_low, known_high = given.totals or (given.surrogate.batches[0], given.surrogate.batches[-1])
        low, high = float(self._times.low_N.sum()), float(self._times.high_N.sum())
        self._low, self._high = math.ceil(max(low, known_low, 1)), math.floor(min(high, known_high))
        if self._low > self._high:
            raise NoFeasiblePlan(
                f"the devices hold {low:g} to {high:g} samples together, totals of {known_low:g} to {known_high:g} "
                "are asked for or profiled. Give totals that the devices can hold"
            )

    def minima(self) -> Iterator[tuple[float, float, float]]:
        """(logarithm of the cost, total, place of the rate) where Nelder-Mead ends, from each start."""
        from scipy.optimize import minimize

        bounds = [(math.log(self._low), math.log(self._high)), (0.0, 1.0)]
        if self._low == self._high:
            ended = minimize(
                lambda point: self._log_cost(self._low, point[0]),
                [0.0],
                method="Nelder-Mead",
                bounds=bounds[1:],
                options={"initial_simplex": [[0.0], [0.3]], "maxfev": _EVALUATIONS, "xatol": 1e-3, "fatol": 1e-5},
            )
            yield float(ended.fun), float(self._low), float(ended.x[0])
            return
        width = bounds[0][1] - bounds[0][0]
        for start in range(_STARTS):
            at = bounds[0][0] + width * (start + 0.5) / _STARTS
            step = width / (2 * _STARTS)
            simplex = [[at, 0.0], [at + step, 0.0], [at, 0.3]]
            ended = minimize(
                lambda point: self._log_cost(math.exp(point[0]), point[1]),
                simplex[0],
                method="Nelder-Mead",
                bounds=bounds,
                options={"initial_simplex": simplex, "maxfev": _EVALUATIONS, "xatol": 1e-3, "fatol": 1e-5},
            )
            # The logarithm may come back a rounding error outside.
            total = min(max(math.exp(ended.x[0]), self._low), self._high)
            yield float(ended.fun), total, float(ended.x[1])

    def _log_cost(self, total: float, above: float) -> float:
        total = min(max(total, self._low), self._high)
        level = self._levels.levels(np.array([total]))
        compute_s, variation = self._slowest(self._levels.split(level)[0])
        kept = self._kept_within(compute_s)
        if kept < self._least_kept:
            return _INFEASIBLE + math.log(self._least_kept / kept)
        rate = self._rate(kept, above)
        extra, step_s = self._given.surrogate.at(rate, total), self._given.rate_cost.step_s(compute_s, 1 - rate)
        return math.log((1 + extra) * step_s / total * (1 + self._given.balance * variation))

    def _kept_within(self, compute_s: float) -> float:
        """The largest share of entries that every link carries within the step that keeps so many, or a little less."""
        cost = self._given.rate_cost
        kept = self._traffic.kept_within(cost.step_s(compute_s, 0.0))
        for _ in range(_CLOSER if cost.seconds else 0):
            kept = self._traffic.kept_within(cost.step_s(compute_s, kept))
        return kept

    def _rate(self, kept_at_most: float, above: float) -> float:
        """The rate at that place, on a scale of the logarithm of what is kept."""
        most = math.log(min(kept_at_most, self._most_kept))
        return 1 - math.exp(most + above * (math.log(self._least_kept) - most))

    def plan(self, total: int, above: float) -> TtaPlan | None:
        """The plan in whole samples, its rate within what the links carry; None where they carry no profiled rate."""
        given = self._given
        level = self._levels.levels(np.array([float(total)]))
        batches = whole(self._times, self._levels.split(level)[0], total)
        compute_s, variation = self._slowest(np.array(batches, dtype=np.float64))
        kept = self._kept_within(compute_s)
        if kept < self._least_kept:
            return None
        rate = self._rate(kept, above)
        extra, step_s = given.surrogate.at(rate, total), given.rate_cost.step_s(compute_s, 1 - rate)
        return TtaPlan(
            rate=rate,
            total_batch=total,
            batches=tuple(batches),
            step_time=step_s,
            communication_time=self._traffic.seconds(1 - rate),
            throughput=total / step_s,
            extra=extra,
            variation=variation,
            tta=given.samples * (1 + extra) * step_s / total,
        )

    def assess(self, rate: float, batches: Sequence[int]) -> TtaPlan:
        total, compute_s_and_cv = sum(batches), self._slowest(np.array(batches, dtype=np.float64))
        communication_s = self._traffic.seconds(1 - rate)
        step_s = max(self._given.rate_cost.step_s(compute_s_and_cv[0], 1 - rate), communication_s)
        extra = self._given.surrogate.at(rate, total)
        return TtaPlan(
            rate=rate,
            total_batch=total,
            batches=tuple(batches),
            step_time=step_s,
            communication_time=communication_s,
            throughput=total / step_s,
            extra=extra,
            variation=compute_s_and_cv[1],
            tta=self._given.samples * (1 + extra) * step_s / total,
        )

    def _slowest(self, batch_N: F64) -> tuple[float, float]:
        """Seconds of the slowest device, and the standard deviation of all over their mean."""
        time_N = self._times.at(batch_N)
        return float(time_N.max()), float(time_N.std() / time_N.mean())

    def links_too_thin(self) -> NoFeasiblePlan:
        needed_s = self._traffic.seconds(self._least_kept)
        longest_s = self._slowest(self._levels.split(self._levels.levels(np.array([float(self._high)])))[0])[0]
        return NoFeasiblePlan(
            f"even the largest profiled rate {1 - self._least_kept:g} needs {needed_s:.3g} s "
            f"a step on the thinnest link, and the longest step takes {longest_s:.3g} s. "
            "Profile larger rates or batches, or let the devices hold larger batches"
        )
