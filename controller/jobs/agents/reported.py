"""Sums up the numbers that a run's scripts report: the mean over its workers, each by its part of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.v1.common_pb2 import Metrics

SILENT_S: Final = 5.0
"""Seconds behind the newest report after which a step no longer waits for a worker."""
KEPT_VALUES: Final = 2**15
"""Limit on the values of a run; beyond it the older half of the steps is closed early."""
FEW: Final = 8
"""Workers after whose first words each is written down; of more, when all have spoken."""


@dataclass(slots=True)
class _Step:
    """Values of one step: by name and rank the value, and the samples of that rank's batch slice."""

    received_s: float
    values: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    is_due: bool = True

    def add(self, rank: int, samples: int, values: Iterable[tuple[str, float]]) -> int:
        """Returns how many values there are more."""
        before = self.count()
        for name, value in values:
            self.values.setdefault(name, {})[rank] = value, samples
        self.ranks.add(rank)
        self.is_due = True
        return self.count() - before

    def count(self) -> int:
        return sum(map(len, self.values.values()))

    def means(self) -> dict[str, float]:
        """Weighted by samples; equally where these are not known."""
        found = {}
        for name, of_ranks in self.values.items():
            known = all(samples > 0 for _, samples in of_ranks.values())
            weights = [samples if known else 1 for _, samples in of_ranks.values()]
            weighed = zip(weights, of_ranks.values(), strict=True)
            found[name] = sum(weight * value for weight, (value, _) in weighed) / sum(weights)
        return found


@dataclass(slots=True)
class Reported:
    """Reported metrics of one run, at most KEPT_VALUES."""

    _steps: dict[int, _Step] = field(default_factory=dict)  # in the order in which they were first heard of
    _newest: dict[int, tuple[int, float]] = field(default_factory=dict)  # step, heard; by rank
    _samples: dict[int, int] = field(default_factory=dict)
    _values: int = 0
    _swept_s: float = math.inf
    _waited_for: int = 0  # known once all had time for a first word, a second after it

    def observe(self, rank: int, samples: int, reports: Iterable[Metrics], now_s: float, *, workers: int) -> list[int]:
        """samples: of a step of the rank; 0 where nothing is said of them. workers: of the run. Returns the steps whose
        means should be kept now: those that nobody spoke of before, that all who report have spoken of, and that are
        over."""
        samples = self._samples[rank] = samples or self._samples.get(rank, 0)
        self._swept_s = min(self._swept_s, now_s)
        self._waited_for += rank not in self._newest and self._waited_for > 0
        spoken = len(self._newest.keys() | {rank})
        waited_for = self._waited_for or (spoken if spoken <= FEW else workers)
        due = []
        for report in reports:
            step = self._steps.get(report.step)
            is_new = step is None
            if step is None:
                step = self._steps[report.step] = _Step(now_s)
            elif rank in step.ranks and report.step != self._newest[rank][0]:  # it went back, as all will
                self._values -= step.count()
                step.values.clear()
                step.ranks.clear()
            self._values += step.add(rank, samples, report.values.items())
            self._newest[rank] = report.step, now_s
            if is_new or len(step.ranks) >= waited_for:
                step.is_due = False
                due.append(report.step)
        if now_s - self._swept_s >= 1.0 or self._values > KEPT_VALUES:
            due += self._sweep(now_s)
        return due

    def means(self, steps: Iterable[int]) -> list[Metrics]:
        """Return the present means of the known ones of these steps."""
        return [Metrics(step=number, values=self._steps[number].means()) for number in steps if number in self._steps]

    def shown(self) -> dict[str, float]:
        """The means of the newest step that all who report have reached, or of the first that is known."""
        reached = self._reached()
        numbers = [number for number in self._steps if number <= reached] or sorted(self._steps)[:1]
        return self._steps[max(numbers)].means() if numbers else {}

    def _alive(self) -> Sequence[int]:
        """The newest steps of those who still report."""
        newest_s = max((received_s for _, received_s in self._newest.values()), default=0.0)
        return [step for step, received_s in self._newest.values() if newest_s - received_s <= SILENT_S]

    def _reached(self) -> int:
        return min(self._alive(), default=0)

    def _sweep(self, now_s: float) -> list[int]:
        """Forgets what has been over for as long again, but for what is shown. Returns the steps of which something was
        said since they were last returned, and nothing is waited for."""
        self._swept_s, self._waited_for = now_s, len(self._alive())
        reached, due = self._reached(), []
        most = KEPT_VALUES // 2 if self._values > KEPT_VALUES else KEPT_VALUES
        shown = max((number for number in self._steps if number <= reached), default=-1)
        for number, step in [*self._steps.items()]:
            old_s = now_s - step.received_s
            if number != shown and (old_s >= 2 * SILENT_S or self._values > most):
                self._values -= step.count()
                del self._steps[number]
            elif step.is_due and (old_s >= SILENT_S or len(step.ranks) >= self._waited_for):
                step.is_due = False
                due.append(number)
        return due


@dataclass(frozen=True, slots=True)
class NewPoints:
    """New points of a run's curves. If written late, they include values that arrived meanwhile."""

    reported: Reported
    steps: Sequence[int]

    def points(self) -> list[Metrics]:
        return self.reported.means(self.steps)
