"""From what the workers of a trial wrote to one number for each of its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.99
"""A step of the reference batch leaves this much of the mean before it (StellaTrain, Algorithm 1)."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Of one rank: the mean loss over its `samples` of the step's batch."""

    step: int
    samples: int
    loss: float


def whole_batches(ranks: Iterable[Sequence[StepLoss]]) -> list[tuple[int, float]]:
    """(samples, mean loss) of each step's whole batch, in order. A rank that had no samples does not count."""
    samples: dict[int, int] = {}
    total: dict[int, float] = {}
    for rank in ranks:
        for seen in rank:
            if seen.samples > 0:
                samples[seen.step] = samples.get(seen.step, 0) + seen.samples
                total[seen.step] = total.get(seen.step, 0.0) + seen.samples * seen.loss
    return [(samples[step], total[step] / samples[step]) for step in sorted(samples)]


def mean(batches: Sequence[tuple[int, float]]) -> float:
    """Over all samples; NaN where there are none."""
    samples = sum(count for count, _ in batches)
    return sum(count * loss for count, loss in batches) / samples if samples else math.nan


def smoothed(batches: Sequence[tuple[int, float]], reference_batch: int) -> float:
    """The running mean of the training loss at its end; NaN or inf where training diverged.

    Algorithm 1 smooths by steps, so that a large batch would be judged by more samples than a small one, and by more of
    its beginning. Here a sample counts alike whatever batch it came in: a batch of b leaves 0.99^(b / reference_batch)
    of the mean before it. And the mean starts with the first loss, not at 0.
    """
    average = weight = 0.0
    for samples, loss in batches:
        if not math.isfinite(loss):
            return loss
        kept = SMOOTHING ** (samples / reference_batch)
        average = kept * average + (1 - kept) * loss
        weight = kept * weight + (1 - kept)
    return average / weight if weight else math.nan
