"""Sums up the numbers that a run's scripts report: their mean over the members, each by its part of the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

KEPT_REPORTS: Final = 16
"""Of each member, the newest: others may be so many reports behind."""
SILENT_S: Final = 5.0
"""Who is so much older than the newest report is not waited for."""


@dataclass(frozen=True, slots=True)
class _Report:
    heard_s: float
    step: int
    values: Mapping[str, float]


@dataclass(slots=True)
class Reported:
    """Of one run. Bounded: KEPT_REPORTS a rank."""

    _of_ranks: dict[int, deque[_Report]] = field(default_factory=dict)

    def observe(self, rank: int, step: int, values: Mapping[str, float], now_s: float) -> None:
        """Of a step before the newest of the rank: nothing happens."""
        reports = self._of_ranks.setdefault(rank, deque(maxlen=KEPT_REPORTS))
        if reports and step < reports[-1].step:
            return
        if reports and step == reports[-1].step:  # more of the same step
            values = {**reports.pop().values, **values}
        reports.append(_Report(now_s, step, dict(values)))

    def shown(self, samples: Mapping[int, int]) -> dict[str, float]:
        """Of the newest step that all who report have reached: each number is the mean over those who reported it,
        weighted by their samples of a step; equally where these are not known."""
        newest_s = max((of[-1].heard_s for of in self._of_ranks.values()), default=0.0)
        alive = {rank: of for rank, of in self._of_ranks.items() if newest_s - of[-1].heard_s <= SILENT_S}
        step = min((of[-1].step for of in alive.values()), default=0)
        known = all(samples.get(rank, 0) > 0 for rank in alive)
        sums: dict[str, tuple[float, float]] = {}
        for rank, reports in sorted(alive.items()):
            report = next((one for one in reversed(reports) if one.step <= step), None)
            weight = float(samples[rank]) if known else 1.0
            for name, value in report.values.items() if report is not None else ():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + weight * value, weights + weight
        return {name: total / weights for name, (total, weights) in sums.items()}
