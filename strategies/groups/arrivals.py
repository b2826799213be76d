"""Arrivals of replicas, expected from how long their last iterations took. Pure: time is given."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

EARLIER: Final = 8  # iterations of a replica from which its next one is predicted


@dataclass
class ArrivalTimes:
    """Arrival times of replicas over all rounds."""

    took_s: dict[int, deque[float]] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)

    def ready(self, replica: int, now_s: float) -> None:
        if (began_s := self.began_s.pop(replica, None)) is not None:
            self.took_s.setdefault(replica, deque(maxlen=EARLIER)).append(now_s - began_s)

    def resumed(self, replica: int, now_s: float) -> None:
        self.began_s[replica] = now_s

    def iteration_s(self) -> float | None:
        """The median replica's; None before two of them were measured."""
        medians = [statistics.median(took) for took in self.took_s.values()]
        return statistics.median(medians) if len(medians) > 1 else None

    def took(self, replica: int) -> float | None:
        """An iteration of it; None before one was measured."""
        took = self.took_s.get(replica)
        return statistics.median(took) if took else None

    def free_s(self, replica: int, now_s: float) -> float:
        """Estimate when a replica is ready; it may already be."""
        took, began_s = self.took(replica), self.began_s.get(replica)
        return now_s if took is None or began_s is None else max(began_s + took, now_s)

    def expected(self, replica: int) -> tuple[float, float] | None:
        """Return the expected and the latest probable time at which a replica is ready."""
        took, began_s = self.took_s.get(replica), self.began_s.get(replica)
        if not took or began_s is None:
            return None
        return began_s + statistics.median(took), began_s + 1.05 * max(took)
