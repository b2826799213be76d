"""What strategy `stale-sparse` counts of itself: waits for updates, and how many layers ran with the newest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from atoll.agent.runtime.step.synchronisation import StepNumbers


class Tally:
    """Used by the training thread alone. Numbers are told twice: of each step, and of the whole run."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._stall_s = self._step_stall_s = 0.0
        self._fresh = self._looked = 0  # in this step
        self._run: defaultdict[str, float] = defaultdict(float)
        self._layer_stalls_s = dict.fromkeys(layers, 0.0)
        self._sent_bytes = 0  # before this step

    def waited_for_all(self, waited_s: float) -> None:
        """For what is of no layer."""
        self._stall_s += waited_s

    def looked(self, layers: Sequence[str], fresh: int, waited_s: float) -> None:
        """These layers of one module got their weights, `fresh` of them newer ones than they had to."""
        self._fresh += fresh
        self._looked += len(layers)
        self._stall_s += waited_s
        for name in layers:  # nobody knows which of them it was
            self._layer_stalls_s[name] += waited_s / len(layers)

    def add(self, counted: Mapping[str, float]) -> None:
        """What the engine counted since the last call."""
        for name, value in counted.items():
            self._run[name] += value

    def take_waited(self) -> float:
        """Seconds since the last call."""
        waited_s, self._stall_s = self._stall_s, 0.0
        self._step_stall_s += waited_s
        return waited_s

    def take_step(self, sparsity: float, sent_bytes: int) -> StepNumbers:
        """Of the step that ends. sent_bytes: since the run began."""
        fresh, looked = self._fresh, self._looked
        self._run["fresh_layers"] += fresh
        self._run["layers"] += looked
        self._fresh = self._looked = 0
        stall_s, self._step_stall_s = self._step_stall_s, 0.0
        before, self._sent_bytes = self._sent_bytes, sent_bytes
        return StepNumbers(
            metrics={
                "sparsity": sparsity,
                "stall_s": stall_s,
                "fresh_share": fresh / looked if looked else 0.0,
                "sent_bytes": sent_bytes - before,
            }
        )

    def statistics(self) -> dict[str, float]:
        """Since the run began."""
        numbers = dict(self._run)
        looked = numbers.pop("layers", 0.0) + self._looked
        fresh = numbers.pop("fresh_layers", 0.0) + self._fresh
        numbers["fresh_share"] = fresh / looked if looked else 0.0
        return numbers | {f"stall_s.{name}": waited_s for name, waited_s in self._layer_stalls_s.items()}
