"""Measures of strategy `stale-sparse`: waits for updates, and how many layers ran with the newest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence


class Tally:
    """A Measures; used by the training thread alone. Numbers are told twice: of each step, and of the whole run."""

    sparsity = 0.0
    """That holds now."""

    def __init__(self, layers: Sequence[str], take_counts: Callable[[], Mapping[str, float]]) -> None:
        """take_counts: what the exchange engine counted since the last call."""
        self._take_counts = take_counts
        self._waited_s = 0.0
        self._fresh = self._fetched = 0  # in this step
        self._run: defaultdict[str, float] = defaultdict(float)
        self._layer_stalls_s = dict.fromkeys(layers, 0.0)

    def fetched(self, layers: Sequence[str], fresh: int, waited_s: float) -> None:
        """These layers of one module got their weights, `fresh` of them newer ones than they had to."""
        self._fresh += fresh
        self._fetched += len(layers)
        self._waited_s += waited_s
        for name in layers:  # nobody knows which of them it was
            self._layer_stalls_s[name] += waited_s / len(layers)

    def take_waited(self) -> float:
        """Seconds since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def take_step(self, stall_s: float, sent_bytes: int) -> dict[str, float]:
        fresh, fetched = self._fresh, self._fetched
        self._run["fresh_layers"] += fresh
        self._run["layers"] += fetched
        self._fresh = self._fetched = 0
        fresh_share = fresh / fetched if fetched else 0.0
        return {"sparsity": self.sparsity, "stall_s": stall_s, "fresh_share": fresh_share, "sent_bytes": sent_bytes}

    def statistics(self) -> dict[str, float]:
        for name, value in self._take_counts().items():
            self._run[name] += value
        numbers = dict(self._run)
        fetched = numbers.pop("layers", 0.0) + self._fetched
        fresh = numbers.pop("fresh_layers", 0.0) + self._fresh
        numbers["fresh_share"] = fresh / fetched if fetched else 0.0
        stalls_s = {f"stall_s.{name}": waited_s for name, waited_s in self._layer_stalls_s.items()}
        return numbers | stalls_s | {"sparsity": self.sparsity}
