"""Measures of strategies with shared parameters: waits for updates, the share of layers that ran with the newest
update, and drift. Imports no torch: the controller reads which numbers workers report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from atoll.strategies.declaration import Metric, Shown

METRICS: Final = (
    Metric("sparsity", "share", "of the entries, left out of this step", "newest"),
    Metric("stall_s", "s", "forward passes waiting for updates", "share of the step"),
    Metric("fresh_share", "share", "of layers that ran with the newest update"),
    Metric("sent_bytes", "bytes", "that left on the wire in this step"),
    Metric("select_s", "s", "of the training processors for choosing what is sent", "share of the step"),
    Metric("apply_s", "s", "of the training processors for summing and applying what came", "share of the step"),
    Metric("drift", "count", "steps' worth of its own updates that a worker has not sent, where updates are exchanged"),
    Metric("round_s", "s", "from this worker's part of a sync round to the shared parameters that have all", "mean"),
    Metric("islands", "count", "whose updates a sync round has: all of the run", "newest"),
    Metric(
        "advantage",
        "count",
        "of a worker's own weights on its own data: by so much the shared model's loss there has a larger logarithm",
    ),
    Metric("every", "count", "steps between two exchanges of one entry", "newest"),
)
"""Numbers that workers with shared parameters report for every step."""


class Tally:
    """A Measures. Used on the training thread alone. It reports each number twice: per step, and for the whole run."""

    sparsity = 0.0
    """Sparsity in use now."""
    advantage = 0.0
    """Advantage of this rank's own weights on its own data."""
    islands = 1
    """Islands whose updates a sync round has: all of the run."""
    every = 1
    """Steps between two choices of one layer's entries."""

    def __init__(self, take_counts: Callable[[], Mapping[str, float]], threads: int) -> None:
        """take_counts: returns what the exchange engine counted since the last call. threads: the number that training
        shares with the exchange; 0: training runs on a device of its own."""
        self._take_counts, self._threads = take_counts, threads
        self._drift = self._round_s = 0.0
        self._bad_blocks = 0.0
        self._waited_s = 0.0
        self._run: defaultdict[str, float] = defaultdict(float)
        self._step: defaultdict[str, float] = defaultdict(float)

    def fetched(self, layers: int, fresh: int, waited_s: float) -> None:
        """Record that so many layers of one module got their weights, `fresh` of them newer than required."""
        self._add({"layers": layers, "fresh_layers": fresh})
        self._waited_s += waited_s

    def take_waited(self) -> float:
        """Return the seconds waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def take_step(self, stall_s: float, sent_bytes: int) -> dict[str, float]:
        self._count()
        counted, self._step = self._step, defaultdict(float)
        select_s, apply_s = self._exchange_s(counted)
        self._drift = self._drift_of(counted) or self._drift  # nothing may have been chosen since the last step
        if counted["rounds"] > 0:  # else none came in this step
            self._round_s = counted["rounds_s"] / counted["rounds"]
        return {
            "sparsity": self.sparsity,
            "stall_s": stall_s,
            "fresh_share": counted["fresh_layers"] / (counted["layers"] or 1),
            "sent_bytes": sent_bytes,
            "select_s": select_s,
            "apply_s": apply_s,
            "drift": self._drift,
            "round_s": self._round_s,
            "every": self.every,
            "islands": self.islands,
            "advantage": self.advantage,
        }

    def take_bad_blocks(self) -> int:
        """Return how many blocks of 16 values the exchange left out since the last call: they were not finite."""
        self._count()
        taken, self._bad_blocks = self._bad_blocks, 0.0
        return int(taken)

    def _drift_of(self, counted: Mapping[str, float]) -> float:
        """Return the steps' worth of its own updates that this rank has not sent; 0 where that was not measured."""
        if not counted["update_squares"] > 0:
            return 0.0
        return self.every * math.sqrt(counted["outstanding_squares"] / counted["update_squares"])

    def _count(self) -> None:
        """Add what the engine counted since the last call to the run's numbers and to the step's."""
        counts = self._take_counts()
        self._bad_blocks += counts.get("nonfinite_blocks", 0.0)
        self._add(counts)

    def _add(self, counts: Mapping[str, float]) -> None:
        for name, value in counts.items():
            if math.isfinite(value):  # of weights that are not finite there is no drift
                self._run[name] += value
                self._step[name] += value

    def _exchange_s(self, counted: Mapping[str, float]) -> tuple[float, float]:
        """Return a step's seconds for choosing entries, and for summing and applying them.

        The engine's threads take their time from all threads that train. Live weights are changed on the training
        thread alone."""
        if not self._threads:
            return 0.0, 0.0
        summed_s = (counted["sum_s"] + counted["update_s"]) / self._threads
        return counted["compress_s"] / self._threads, summed_s + counted["publish_s"]

    def statistics(self) -> dict[str, float]:
        self._count()
        numbers = dict(self._run)
        numbers["fresh_share"] = numbers.pop("fresh_layers", 0.0) / (numbers.pop("layers", 0.0) or 1)
        numbers["drift"], numbers["advantage"] = self._drift_of(numbers), self.advantage
        numbers["round_s"] = numbers["rounds_s"] / numbers["rounds"] if numbers["rounds"] else 0.0
        del numbers["outstanding_squares"], numbers["update_squares"], numbers["rounds_s"]
        return numbers | {"sparsity": self.sparsity}


def drift_of(shown: Shown) -> list[str]:
    """Return 'drift 8.3 steps'; nothing where the drift is not known."""
    drift = shown.metrics.get("drift", 0.0)
    return [f"drift {drift:.3g} steps"] if drift > 0 else []
