"""Reads back what the ranks wrote down (`recording`): which run trained which step, with what, from which weights."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from atoll.errors import BadInput

_STEPS: Final = re.compile(r"run-(\d+)-rank-(\d+)\.jsonl")
_FINAL: Final = re.compile(r"final-rank-(\d+)\.json")


class Incarnation(NamedTuple):
    """A view of a run: who trained together."""

    run: int
    view: int = 1

    def __str__(self) -> str:
        return str(self.run) if self.view == 1 else f"{self.run} view {self.view}"


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that a rank of a run began, in a view of it."""

    run: Incarnation
    rank: int  # in the view
    step: int
    epoch: int
    samples: tuple[int, ...]
    weights: str
    """Hash of what it began from: the result of the step before."""
    at_s: float
    """Wall clock of the machine."""


@dataclass(frozen=True)
class Evidence:
    """All of one job. `final`: by rank, the hash of the weights that it ended with."""

    begun: tuple[Begun, ...]
    final: Mapping[int, str]

    @cached_property
    def by_step(self) -> Mapping[int, Mapping[Incarnation, Mapping[int, Begun]]]:
        """step -> run -> rank; each in ascending order. A rank that began a step of a run twice: see `invariants`."""
        found: dict[int, dict[Incarnation, dict[int, Begun]]] = defaultdict(lambda: defaultdict(dict))
        for one in sorted(self.begun, key=lambda one: (one.step, one.run, one.rank)):
            found[one.step][one.run][one.rank] = one
        return found

    @cached_property
    def spans(self) -> Mapping[Incarnation, tuple[int, int]]:
        """run -> its first and its last step."""
        found: dict[Incarnation, tuple[int, int]] = {}
        for one in self.begun:
            first, last = found.get(one.run, (one.step, one.step))
            found[one.run] = (min(first, one.step), max(last, one.step))
        return dict(sorted(found.items()))

    def that_counts(self, step: int) -> Mapping[int, Begun]:
        """The step as the newest run trained it, by rank."""
        runs = self.by_step[step]
        return runs[max(runs)]

    @cached_property
    def shown_again(self) -> frozenset[tuple[Incarnation, int]]:
        """(run, step) without effect: a run that goes on at the very end of an epoch shows the epoch's last batch once
        more. It begins with the weights of the step after."""
        found = set()
        for run, (first, _) in self.spans.items():
            earlier = [other for other in self.by_step[first] if other < run]
            if not earlier or not self._ends_epoch(first):
                continue
            after = {one.weights for ranks in self.by_step.get(first + 1, {}).values() for one in ranks.values()}
            after |= set() if first + 1 in self.by_step else set(self.final.values())
            if {one.weights for one in self.by_step[first][run].values()} <= after:
                found.add((run, first))
        return frozenset(found)

    def _ends_epoch(self, step: int) -> bool:
        if step + 1 not in self.by_step:
            return True
        here, after = (next(iter(self.that_counts(one).values())) for one in (step, step + 1))
        return here.epoch != after.epoch


def parse(run: int, rank: int, text: str) -> Iterable[Begun]:
    """The lines of one file. What follows the last newline is still being written. Raises BadInput naming the line."""
    lines = text.split("\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            entry = {"view": 1, "rank": rank} | json.loads(line)
            yield Begun(
                run=Incarnation(run, int(entry["view"])), rank=int(entry["rank"]),
                step=int(entry["step"]), epoch=int(entry["epoch"]),
                samples=tuple(map(int, entry["ids"])), weights=str(entry["weights"]), at_s=float(entry["at"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            why = f"line {number} of run {run}, rank {rank} is no step of a recorder ({error}): {line[:80]!r}"
            raise BadInput(f"{why}. Write steps with drill.recording.Recorder") from error


def step_files(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Those that ranks write of their steps, each with its run and its number there."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _STEPS.fullmatch(path.name)) is not None:
            yield path, int(match[1]), int(match[2])


def read(folder: Path) -> Evidence:
    """All that ranks wrote into the folder so far. Raises BadInput for what is no evidence."""
    begun: list[Begun] = []
    final: dict[int, str] = {}
    for path, run, rank in step_files(folder):
        begun += parse(run, rank, path.read_text())
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _FINAL.fullmatch(path.name)) is not None:
            final[int(match[1])] = str(json.loads(path.read_text())["weights"])
    return Evidence(tuple(begun), final)
