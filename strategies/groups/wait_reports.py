"""Reports of why groups waited, for `atoll events`. Pure: time is given."""

from __future__ import annotations

import math
from typing import Final

from atoll.controller.planners.pipelines.group_rounds import RoundGroup
from atoll.controller.planners.pipelines.group_waits import StageWaits

FIRST_PAUSE_S: Final = 60.0
"""Seconds between the first report of a view and the second; doubled each time."""
LONGEST_PAUSE_S: Final = 3600.0
MOST_STAGES: Final = 4
"""Most stages in one report: those that waited longest."""


class WaitReports:
    """The first reason at once, later ones summed up, more and more seldom: a job keeps only so many events, and groups
    are formed by the hundred thousand in a night."""

    def __init__(self, history: int) -> None:
        """history: as of GroupRounds."""
        self._history = history
        self._stages: dict[int, StageWaits] = {}
        self._news = False
        self._due_s, self._pause_s = -math.inf, FIRST_PAUSE_S

    def add(self, group: RoundGroup) -> None:
        if self._stages.setdefault(group.stage, StageWaits()).add(group):
            self._news = True

    def take(self, now_s: float) -> list[str]:
        """A sentence for each stage that has waited since the last report; none before the next one is due."""
        if not self._news or now_s < self._due_s:
            return []
        self._due_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        longest = sorted(self._stages, key=lambda stage: (-self._stages[stage].waited_s, stage))
        told = [self._stages[stage].in_words(stage, self._history) for stage in longest]
        self._stages, self._news = {}, False
        return [sentence for sentence in told if sentence is not None][:MOST_STAGES]
