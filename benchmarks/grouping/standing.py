"""Standing of the rules that group replicas, on the same samples: rounds a second, and time to a held-out loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

GOALS: Final = {"slower": (("all", 2.5), ("pairs", 1.3), ("static", 1.5)), "equal": (("all", 1.0),)}
"""By case: how many times as many rounds a second `scheduled` is to have as which rule."""
SOONER: Final = {"slower": 1.5, "equal": 1.0}
"""By case: how many times sooner than the all-reduce it is to reach a held-out loss."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A job. curve: at each round's end seconds since the first one began, and the held-out loss."""

    case: str
    rule: str
    seed: int
    bubble: float
    curve: tuple[tuple[float, float], ...]

    @property
    def rounds_per_s(self) -> float:
        """Of those after the first."""
        return (len(self.curve) - 1) / (self.curve[-1][0] - self.curve[0][0])

    @property
    def last_loss(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several seeds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def __format__(self, how: str) -> str:
        if self.least == self.most:
            return f"{self.median:{how}}"
        return f"{self.median:{how}} [{self.least:{how}} to {self.most:{how}}]"


class Standing:
    """Of one case. Of several seeds median, least and most; a seed's target is the lowest loss that all rules reach."""

    def __init__(self, trained: Sequence[Trained]) -> None:
        self.case, self.rules = trained[0].case, list(dict.fromkeys(one.rule for one in trained))
        self._by = {(one.rule, one.seed): one for one in trained}
        seeds = dict.fromkeys(one.seed for one in trained)
        self._seeds = [seed for seed in seeds if all((rule, seed) in self._by for rule in self.rules)]
        self._targets = {
            seed: max(min(loss for _, loss in self._by[rule, seed].curve) for rule in self.rules)
            for seed in self._seeds
        }

    def reached_s(self, one: Trained) -> float:
        return next(at_s for at_s, held_out in one.curve if held_out <= self._targets[one.seed])

    def of(self, rule: str, value: Callable[[Trained], float]) -> Spread:
        return Spread.of([value(self._by[rule, seed]) for seed in self._seeds])

    def times(self, rule: str, than: str, value: Callable[[Trained], float]) -> Spread:
        """By seed: how many times as much."""
        return Spread.of([value(self._by[rule, seed]) / value(self._by[than, seed]) for seed in self._seeds])

    def table(self) -> list[str]:
        """A row for each rule."""
        told = [
            "| `grouping` | rounds/s | times `all` | the same held-out loss, s | times `all` | last loss | bubbles |",
            "|---|---|---|---|---|---|---|",
        ]
        for rule in self.rules:
            cells = [
                f"`{rule}`",
                f"{self.of(rule, lambda one: one.rounds_per_s):.3f}",
                f"{self.times(rule, 'all', lambda one: one.rounds_per_s):.2f}",
                f"{self.of(rule, self.reached_s):.1f}",
                f"{self.times(rule, 'all', self.reached_s):.2f}",
                f"{self.of(rule, lambda one: one.last_loss):.3f}",
                f"{self.of(rule, lambda one: one.bubble):.2f}",
            ]
            told.append(f"| {' | '.join(cells)} |")
        return told

    def goals(self) -> list[str]:
        """How `scheduled` stands to what is asked of it."""
        if "scheduled" not in self.rules:
            return []
        told = [
            f"{self.times('scheduled', rule, lambda one: one.rounds_per_s):.2f} times the rounds a second of `{rule}`, "
            f"goal {goal:g}"
            for rule, goal in GOALS[self.case]
            if rule in self.rules
        ]
        sooner = self.times("all", "scheduled", self.reached_s)
        seeds = self.of("all", lambda one: one.last_loss)
        return [
            *told,
            f"the same held-out loss {sooner:.2f} times sooner than `all`, goal {SOONER[self.case]:g}",
            f"last loss {self.of('scheduled', lambda one: one.last_loss):.3f}, of `all` {seeds:.3f}",
        ]
