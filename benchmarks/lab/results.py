"""From what the workers told to figures: step times, loss curves, time to a target; extrapolated ones are marked."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from lab.cell import CellRecord

WINDOW: Final = 10  # iterations that a loss is averaged over, and all workers
WARM_UP: Final = 3  # iterations that no step time counts: caches, DDP's new buckets, PowerSGD's two whole gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of the whole job: when the last worker finished it, and the mean of all workers' losses in it."""

    at_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell, as it is written to JSON."""

    model: str
    workers: int
    rate: str
    rtt_ms: float
    method: str
    repeat: int
    asked_steps: int
    ended: str  # why before all steps were done; empty: they were
    points: Sequence[Point]
    step_s: Sequence[float]  # all workers' steps after the warm-up
    sent_bytes_per_step: float  # of a worker's machine, on the veth, headers and all
    beyond: float | None  # peak memory beyond model and optimizer over the parameters' bytes, the worst worker's
    statistics: Mapping[str, float] = field(default_factory=dict)  # the strategy's own, mean of the workers
    held_out: float | None = None  # loss on held-out samples of the model at the end, mean of the workers'

    @property
    def step_median_s(self) -> float:
        return statistics.median(self.step_s)

    def smooth(self) -> list[Point]:
        """The loss as the mean of WINDOW iterations, from the first whole window on."""
        ends = range(WINDOW, len(self.points) + 1)
        return [
            Point(
                at_s=self.points[end - 1].at_s,
                loss=statistics.fmean(point.loss for point in self.points[end - WINDOW : end]),
            )
            for end in ends
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def result(record: CellRecord, repeat: int) -> Result:
    """The figures of one cell."""
    work, complete = record.work, record.complete
    rows = list(zip(*(steps[:complete] for steps in record.steps), strict=True))
    points = [Point(at_s=max(one.at_s for one in row), loss=statistics.fmean(one.loss for one in row)) for row in rows]
    skip = min(WARM_UP, complete - 1)
    if work.method.name == "ddp-powersgd":
        skip = WARM_UP  # its first steps send whole gradients: better no figure than theirs
    step_s, sent = [], []
    if complete > max(skip, 1):
        for steps in record.steps:
            timed = steps[skip - 1 if skip else 0 : complete]
            step_s += [after.at_s - before.at_s for before, after in pairwise(timed)]
            sent.append((timed[-1].sent_bytes - timed[0].sent_bytes) / (len(timed) - 1))
    told = list(record.done.values())
    names = sorted({name for one in told for name in one["statistics"]})
    return Result(
        model=work.model,
        workers=work.workers,
        rate=work.rate.text,
        rtt_ms=work.rtt_ms,
        method=work.method.text,
        repeat=repeat,
        asked_steps=work.steps,
        ended=record.ended,
        points=points,
        step_s=step_s,
        sent_bytes_per_step=statistics.fmean(sent) if sent else 0.0,
        beyond=max((row.beyond_bytes for row in rows[-1]), default=0) / record.parameter_bytes if rows else None,
        held_out=statistics.fmean(one["held_out"] for one in told) if told and not record.ended else None,
        statistics={name: statistics.fmean(one["statistics"].get(name, 0.0) for one in told) for name in names},
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a loss was reached, or would have been."""

    steps: int
    seconds: float
    extrapolated: bool

    def __str__(self) -> str:
        return f"{'~' if self.extrapolated else ''}{self.seconds:.1f} s, {self.steps} it"


def steps_to(curve: Sequence[Point], target: float) -> int | None:
    """The first iteration after which the smoothed loss is at or below the target."""
    return next((WINDOW + i for i, point in enumerate(curve) if point.loss <= target), None)


def stretched(cell: Result, unshaped: Result) -> list[Point]:
    """The smoothed losses of the unshaped run at the times when `cell` would have come there.

    Iterations that `cell` did take as long as they took, each of the others its median step."""
    done = len(cell.points)
    last_s = cell.points[-1].at_s
    return [
        Point(
            at_s=cell.points[step - 1].at_s if step <= done else last_s + (step - done) * cell.step_median_s,
            loss=point.loss,
        )
        for step, point in enumerate(unshaped.smooth(), start=WINDOW)
    ]


def arrival(cell: Result, unshaped: Result | None, target: float) -> Arrival | None:
    """When `cell` reached the target: measured, else extrapolated, None where nothing says that it would."""
    if (steps := steps_to(cell.smooth(), target)) is not None:
        return Arrival(steps, cell.points[steps - 1].at_s, extrapolated=False)
    if not cell.ended or unshaped is None or not cell.step_s:
        return None  # it did all its steps and never came there
    curve = stretched(cell, unshaped)
    if (steps := steps_to(curve, target)) is None:
        return None
    return Arrival(steps, curve[steps - WINDOW].at_s, extrapolated=True)


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """The smoothed loss after all steps that were asked for."""

    loss: float
    unshaped: bool  # of the method's unshaped run: this cell was ended before

    def __str__(self) -> str:
        return f"{'~' if self.unshaped else ''}{self.loss:.3f}"


def final_loss(cell: Result, unshaped: Result | None) -> FinalLoss | None:
    """None where neither the cell nor the method's unshaped run did all steps."""
    for one in (cell, unshaped):
        if one is not None and len(one.points) == cell.asked_steps >= WINDOW:
            return FinalLoss(one.smooth()[-1].loss, unshaped=one is not cell)
    return None
