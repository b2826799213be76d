"""Planner of sparsity and batches for the least time to accuracy over thin links between islands.

Source: StellaTrain (Lim et al., 2024), Eq. 1-6. Differences, all on purpose: Eq. 3 is taken as standard deviation
over mean (as printed its sums lack 1/n); Eq. 6 counts the bytes that really cross each island's link (values,
indices, copies) in place of the model's size; the balance term scales the time to accuracy, so its weight has no
unit. The time of a step depends on the batches only through the slowest device, so for each total the split that
makes it fastest is taken exactly, and Nelder-Mead searches over sparsity and total alone: two dimensions for any number
of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import F64, Bounds, Levels, PiecewiseTimes, whole
from atoll.controller.planners.islands.wire_bytes import MIN_SPARSITY, UpdateTraffic, update_density
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import (
    MAX_BATCH,
    MAX_NODES,
    BytesPerSecond,
    Samples,
    Schema,
    Seconds,
    Sparsity,
    TotalBatch,
)

_STARTS: Final = 4
"""Searches along the range of the total batch: the time to accuracy may have several minima."""
_MAX_EVALUATIONS: Final = 80
"""Evaluations of each search; two dimensions settle in fewer."""
_MIN_STEP_SHARE: Final = 0.2
"""Share of a measured step that stays, whatever fewer entries would save."""
_DENSITY_ROUNDS: Final = 4
"""Rounds to settle the density: a longer step carries more, and more makes it longer. Each round is feasible."""
_INFEASIBLE: Final = 1e3
"""Logarithm above that of any time to accuracy."""


class MeasuredDevice(NodeModel):
    """Device with a measured step. island: number of its link."""

    island: Samples = 0

    def step_s(self) -> tuple[float, float, float]:
        """Return (per_sample, fixed, floor): a batch of x takes max(per_sample x + fixed, floor) seconds."""
        return self.q + self.k, self.s + self.m, 0.0


class SaturatingDevice(Bounds):
    """Throughput min(beta / alpha x, beta) samples a second: alpha samples saturate it. Source: StellaTrain, Eq. 2."""

    alpha: Annotated[float, Field(ge=0, le=MAX_BATCH)]
    beta: Annotated[float, Field(ge=1e-6, le=1e9)]
    island: Samples = 0

    def step_s(self) -> tuple[float, float, float]:
        """Return the same as MeasuredDevice.step_s."""
        return 1 / self.beta, 0.0, self.alpha / self.beta


def _kind(device: object) -> str:
    measured = "q" in device if isinstance(device, dict) else isinstance(device, MeasuredDevice)
    return "(measured)" if measured else "(saturating)"


Device = Annotated[
    Annotated[MeasuredDevice, Tag("(measured)")] | Annotated[SaturatingDevice, Tag("(saturating)")],
    Discriminator(_kind),
]


class SparsityCost(Schema):
    """Device time of the exchange: a step with a density of 1 takes `seconds` longer than one with 0, for entries are
    selected, summed and applied. Steps of the devices were measured at `sparsity`."""

    seconds: Seconds
    sparsity: Sparsity


class TtaInput(Schema):
    """bandwidths: bytes a second of each island's link to the others, each way. entries: of the model. value_bytes:
    bytes of an entry's value on the wire. balance: weight of unequal device times; 0 leaves them out. samples: to train
    until the accuracy is reached with neither compression nor staleness. totals: the least and the largest total batch
    to choose from; None: those of the surrogate."""

    devices: Annotated[tuple[Device, ...], Field(min_length=1, max_length=MAX_NODES)]
    bandwidths: Annotated[tuple[BytesPerSecond, ...], Field(min_length=1, max_length=MAX_NODES)]
    entries: TotalBatch
    surrogate: Surrogate
    samples: TotalBatch
    value_bytes: Annotated[int | float, Field(gt=0, le=8)] = 2
    balance: Annotated[float, Field(ge=0, le=1e3)] = 0.1
    totals: tuple[TotalBatch, TotalBatch] | None = None
    sparsity_cost: SparsityCost = SparsityCost(seconds=0.0, sparsity=0.0)

    @model_validator(mode="after")
    def _agrees(self) -> TtaInput:
        last = len(self.bandwidths) - 1
        for i, device in enumerate(self.devices):
            if device.island > last:
                raise ValueError(f"devices[{i}].island = {device.island} must be at least 0 and at most {last}")
        if self.totals is not None and self.totals[0] > self.totals[1]:
            raise ValueError(
                f"totals = {list(self.totals)} must be the least and the largest total batch, in this order"
            )
        return self


@dataclass(frozen=True, slots=True)
class TtaPlan:
    """sparsity: share of entries not sent. tta, step_time, communication_time: predicted seconds, the latter per step.
    extra: relative extra loss from the surrogate. variation: standard deviation over mean of the devices' times."""

    sparsity: float
    total_batch: int
    batches: tuple[int, ...]
    step_time: float
    communication_time: float
    throughput: float
    extra: float
    variation: float
    tta: float


def plan_tta(given: TtaInput) -> TtaPlan:
    """Minimise the time to accuracy over sparsity r and batches x_i, such that every link carries its bytes within T:

        samples (1 + g(r, X)) T / X * (1 + balance CV),  X = sum x_i,  T = max_i T_i(x_i),  CV = std(T_i) / mean(T_i)

    Source: StellaTrain, Eq. 3-6. Raises NoFeasiblePlan.
    """
    search = _Search(given)
    places: dict[int, float] = {}  # place of the sparsity by whole total, from the best search that ended there
    for _, total, above in sorted(search.minima()):
        for whole_total in (math.floor(total), math.ceil(total)):
            places.setdefault(whole_total, above)
    found = [plan for total, above in places.items() if (plan := search.plan(total, above)) is not None]
    if not found:
        raise search.links_too_thin()
    return min(found, key=lambda plan: plan.tta * (1 + given.balance * plan.variation))


def assess_tta(given: TtaInput, sparsity: float, batches: Sequence[int]) -> TtaPlan:
    """Return the plan of a given sparsity and batches. Links that are too thin for them set the step's time."""
    return _Search(given).assess(sparsity, batches)


class _Search:
    """Search over the total batch and the place of the sparsity: 0 for the least that links carry, 1 for the largest
    that was profiled."""

    def __init__(self, given: TtaInput) -> None:
        self._given = given
        per_sample, fixed, floor = np.array([d.step_s() for d in given.devices], dtype=np.float64).T
        slope, offset = np.stack([per_sample, np.zeros_like(floor)]), np.stack([fixed, floor])
        self._times = PiecewiseTimes.of(slope, offset, given.devices)
        self._levels = Levels(self._times)
        devices = np.bincount([d.island for d in given.devices], minlength=len(given.bandwidths))
        self._traffic = UpdateTraffic(
            given.entries, given.value_bytes, devices / devices.sum(), np.array(given.bandwidths, dtype=np.float64)
        )
        self._whole = self._density(0.0)
        self._most_dense = self._density(given.surrogate.sparsities[0])
        self._least_dense = self._density(given.surrogate.sparsities[-1])
        known_low, known_high = given.totals or (given.surrogate.batches[0], given.surrogate.batches[-1])
        low, high = float(self._times.low_N.sum()), float(self._times.high_N.sum())
        self._low, self._high = math.ceil(max(low, known_low, 1)), math.floor(min(high, known_high))
        if self._low > self._high:
            raise NoFeasiblePlan(
                f"the devices hold {low:g} to {high:g} samples together, totals of {known_low:g} to {known_high:g} "
                "are asked for or profiled. Give totals that the devices can hold"
            )

    def minima(self) -> Iterator[tuple[float, float, float]]:
        """Yield (logarithm of the cost, total, place of the sparsity) where Nelder-Mead ends, from each start."""
        from scipy.optimize import minimize

        low, high = math.log(self._low), math.log(self._high)
        step = (high - low) / (2 * _STARTS)
        fixed = self._low == self._high  # then the place is the only dimension
        for at in [low] if fixed else [low + (high - low) * (start + 0.5) / _STARTS for start in range(_STARTS)]:
            simplex = [[0.0], [0.3]] if fixed else [[at, 0.0], [at + step, 0.0], [at, 0.3]]
            ended = minimize(
                lambda point: self._log_cost(self._low if fixed else math.exp(point[0]), point[-1]),
                simplex[0],
                method="Nelder-Mead",
                bounds=[(low, high), (0.0, 1.0)][fixed:],
                options={"initial_simplex": simplex, "maxfev": _MAX_EVALUATIONS, "xatol": 1e-3, "fatol": 1e-5},
            )
            yield float(ended.fun), self._within(self._low if fixed else math.exp(ended.x[0])), float(ended.x[-1])

    def _within(self, total: float) -> float:
        """Return the total within its range: its logarithm may be a rounding error outside."""
        return float(min(max(total, self._low), self._high))

    def _log_cost(self, total: float, above: float) -> float:
        total = self._within(total)
        compute_s, variation = self._slowest(self._fastest_split(total))
        density = self._density_within(compute_s)
        if density < self._least_dense:
            return _INFEASIBLE + math.log(self._least_dense / density)
        sparsity = self._sparsity(density, above)
        extra = self._given.surrogate.at(sparsity, total)
        step_s = self._step_s(compute_s, self._density(sparsity))
        return math.log((1 + extra) * step_s / total * (1 + self._given.balance * variation))

    def _density_within(self, compute_s: float) -> float:
        """Return the largest density that every link carries within the step that has it, or a little less."""
        if self._most_dense >= 1 and self._traffic.seconds(self._whole) <= self._step_s(compute_s, self._whole):
            return self._whole
        density = self._traffic.density_within(self._step_s(compute_s, 0.0))
        for _ in range(_DENSITY_ROUNDS if self._given.sparsity_cost.seconds else 0):
            density = self._traffic.density_within(self._step_s(compute_s, density))
        return min(density, 1 - MIN_SPARSITY)

    def _density(self, sparsity: float) -> float:
        return update_density(sparsity, len(self._given.devices))

    def _step_s(self, compute_s: float, density: float) -> float:
        """Seconds of a step with this density, from those with the density under which the devices were measured."""
        cost = self._given.sparsity_cost
        return max(compute_s + cost.seconds * (density - self._density(cost.sparsity)), _MIN_STEP_SHARE * compute_s)

    def _sparsity(self, density_at_most: float, above: float) -> float:
        """Return the sparsity at that place, on a scale of the logarithm of the density."""
        densest = min(density_at_most, self._most_dense)
        most, least = math.log(min(densest, 1.0)), math.log(min(self._least_dense, 1.0))
        sparsity = 1 - math.exp(most + above * (least - most))
        if sparsity >= MIN_SPARSITY:
            return sparsity
        return 0.0 if densest >= 1 else MIN_SPARSITY

    def plan(self, total: int, above: float) -> TtaPlan | None:
        """Return the plan in whole samples with a sparsity that the links carry; None if they carry no profiled one."""
        batches = whole(self._times, self._fastest_split(total), total)
        compute_s, _ = self._slowest(np.array(batches, dtype=np.float64))
        density = self._density_within(compute_s)
        if density < self._least_dense:
            return None
        sparsity = self._sparsity(density, above)
        return self._outcome(sparsity, batches, self._step_s(compute_s, self._density(sparsity)))

    def assess(self, sparsity: float, batches: Sequence[int]) -> TtaPlan:
        compute_s, _ = self._slowest(np.array(batches, dtype=np.float64))
        density = self._density(sparsity)
        step_s = self._step_s(compute_s, density)
        return self._outcome(sparsity, batches, max(step_s, self._traffic.seconds(density)))

    def _outcome(self, sparsity: float, batches: Sequence[int], step_s: float) -> TtaPlan:
        total = sum(batches)
        extra = self._given.surrogate.at(sparsity, total)
        return TtaPlan(
            sparsity=sparsity,
            total_batch=total,
            batches=tuple(batches),
            step_time=step_s,
            communication_time=self._traffic.seconds(self._density(sparsity)),
            throughput=total / step_s,
            extra=extra,
            variation=self._slowest(np.array(batches, dtype=np.float64))[1],
            tta=self._given.samples * (1 + extra) * step_s / total,
        )

    def _fastest_split(self, total: float) -> F64:
        batch_N: F64 = self._levels.split(self._levels.levels(np.array([float(total)])))[0]
        return batch_N

    def _slowest(self, batch_N: F64) -> tuple[float, float]:
        """Return the seconds of the slowest device, and the standard deviation of all over their mean."""
        time_N = self._times.at(batch_N)
        return float(time_N.max()), float(time_N.std() / time_N.mean())

    def links_too_thin(self) -> NoFeasiblePlan:
        needed_s = self._traffic.seconds(self._least_dense)
        longest_s = self._slowest(self._fastest_split(self._high))[0]
        return NoFeasiblePlan(
            f"even the largest profiled sparsity {self._given.surrogate.sparsities[-1]:g} needs {needed_s:.3g} s "
            f"a step on the thinnest link, and the longest step takes {longest_s:.3g} s. "
            "Profile larger sparsities or batches, or let the devices hold larger batches"
        )
