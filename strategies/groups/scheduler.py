"""Scheduler of strategy `groups`: answers the replicas' signals with groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.planners.pipelines.group_rounds import GroupRounds, RoundGroup, departed, passed, ready
from atoll.controller.planners.pipelines.group_waits import StageWaits
from atoll.strategies.groups.ledger import ArrivalTimes
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.rules import RandomPairs, StageRule, Static, WholePipelines
from atoll.strategies.groups.settings import Groups

FIRST_WINDOW_S: Final = 0.1  # as long as nobody's iterations were measured
WIDEST: Final = 1.5  # windows, where somebody is late whom it was opened for

FIRST_PAUSE_S: Final = 60.0
"""Seconds between the first report of a view and the second; doubled each time."""
LONGEST_PAUSE_S: Final = 3600.0
MOST_STAGES: Final = 4
"""Most stages in one report: those that waited longest."""


class Scheduled:
    """SDPipe's: a scheduler for each stage, and one enforcement at a time over all of them.

    A window is not kept open for those who will not come in it: arrivals are predicted, and it ends with the last one
    that is expected. It is widened where one of these is late."""

    def __init__(self, stages: int, replicas: int, history: int, window_s: float, arrivals: ArrivalTimes) -> None:
        """window_s: 0: by the iterations' time. arrivals: by rank. All replicas are equal as the round begins."""
        rounds = GroupRounds.of(stages, replicas, history)
        met = tuple(replace(stage, recent=(stage.live,) if history > 1 else ()) for stage in rounds.stages)
        self._rounds = replace(rounds, stages=met)
        self._window_s, self._arrivals, self._replicas = window_s, arrivals, replicas
        self._widened: dict[int, float] = {}  # by stage: how long its window is without that

    @property
    def due_s(self) -> float | None:
        return self._rounds.due_s

    def ready(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]:
        here = self._rounds.stages[stage]
        if replica not in here.live:
            return []  # it said before that it was done
        window_s = self._window(stage, replica, now_s) if not here.ready else 0.0
        self._rounds, formed = ready(self._rounds, stage, replica, now_s, window_s)
        return self._with_widths(formed)

    def done(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]:
        self._rounds, formed = departed(self._rounds, stage, replica, now_s)
        return self._with_widths(formed)

    def passed(self, now_s: float) -> list[RoundGroup]:
        self._rounds, formed = passed(self._rounds, now_s)
        return self._with_widths(formed)

    def _window(self, stage: int, first: int, now_s: float) -> float:
        """Return the length of a window that the replica `first` opens now."""
        self._widened.pop(stage, None)
        iteration_s = self._arrivals.iteration_s()
        longest_s = self._window_s or (FIRST_WINDOW_S if iteration_s is None else iteration_s / self._replicas)
        if iteration_s is None:
            return longest_s
        stages, others = len(self._rounds.stages), self._rounds.stages[stage].live - {first}
        expected = [self._arrivals.expected(replica * stages + stage) for replica in others]
        surely_s = [each[1] for each in expected if each is not None and each[0] <= now_s + longest_s]
        window_s = min(max(0.0, *surely_s) - now_s, WIDEST * longest_s) if surely_s else 0.0
        if window_s > longest_s:
            self._widened[stage] = longest_s
        return window_s

    def _with_widths(self, formed: list[RoundGroup]) -> list[RoundGroup]:
        told = []
        for group in formed:
            usual_s = self._widened.pop(group.stage, math.inf)
            widened_s = max(group.waited_s - group.held_s - usual_s, 0.0)
            told.append(replace(group, widened_s=widened_s) if widened_s else group)
        return told


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


@dataclass(slots=True)
class _Replica:
    rank: int = -1  # in the run; known once it has said something
    signal: int = 0  # the newest
    answer: GroupsMessage | None = None  # of it


class GroupScheduler:
    """Scheduler of one run, through its views. Signals may come late, twice, or not at all; a lost answer is
    repeated."""

    def __init__(self, settings: Groups) -> None:
        self._settings, self._view = settings, -1
        self._begin_view(-1, 0)

    def _begin_view(self, view: int, workers: int) -> None:
        self._view, self._workers = view, [_Replica() for _ in range(workers)]
        self._arrivals, self._waits = ArrivalTimes(), WaitReports(self._settings.history)
        self._round, self._groups = -1, 0
        self._lost: set[int] = set()  # ranks that another one reported; it may have been wrong about a slow one
        self._rule: StageRule | None = None  # before the first round

    @property
    def due_s(self) -> float | None:
        return self._rule.due_s if self._rule is not None else None

    def heard(self, rank: int, message: GroupsMessage, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        """rank: in the run, as answers have it."""
        if message.view > self._view:
            self._begin_view(message.view, message.workers)
        if message.view < self._view or message.rank >= len(self._workers):
            return []
        self._workers[message.rank].rank = rank
        if message.rank in self._lost:
            return self._left_out([message.rank])
        if message.round > self._round or self._rule is None:  # all averaged at the end of the round before
            self._round, self._groups, self._rule = message.round, 0, self._new_rule()
        if message.round < self._round:
            return []
        known = [ended for ended in message.ended if ended < len(self._workers)]
        formed = [group for ended in known for group in self._rule.done(*self._place(ended), now_s)]
        told = self._left_out([ended for ended in known if ended not in self._lost])
        self._lost.update(known)
        return [*told, *self._answers(formed, now_s), *self._answer(self._rule, message, now_s)]

    def _left_out(self, ranks: Iterable[int]) -> list[tuple[int, GroupsMessage]]:
        """Tell these replicas, which may live, that the others go on without them."""
        known = [self._workers[one].rank for one in ranks if self._workers[one].rank >= 0]
        return [(rank, GroupsMessage(view=self._view, lost=True)) for rank in known]

    def passed(self, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        return self._answers(self._rule.passed(now_s), now_s) if self._rule is not None else []

    def take_notices(self, now_s: float) -> list[str]:
        """Return why groups waited."""
        return self._waits.take(now_s)

    def _answer(self, rule: StageRule, message: GroupsMessage, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        rank = message.rank
        replica = self._workers[rank]
        if message.signal > replica.signal:
            replica.signal, replica.answer = message.signal, None
            self._arrivals.ready(rank, now_s)
            if self._settings.overlaps:
                self._arrivals.resumed(rank, now_s)
            return self._answers(rule.ready(*self._place(rank), now_s), now_s)
        if message.done:
            return self._answers(rule.done(*self._place(rank), now_s), now_s)
        if message.signal < replica.signal or not message.signal:
            return []
        waits = GroupsMessage(view=self._view, round=self._round, signal=replica.signal, waits=True)
        return [(replica.rank, replica.answer or waits)]

    def _answers(self, formed: list[RoundGroup], now_s: float) -> list[tuple[int, GroupsMessage]]:
        answers = []
        for group in formed:
            self._groups += 1
            self._waits.add(group)
            members = [replica * self._settings.stages + group.stage for replica in group.members]
            signals = [self._workers[member].signal for member in members]
            alike = GroupsMessage(
                view=self._view, round=self._round, group=self._groups, members=members, signals=signals
            )
            for member, signal in zip(members, signals, strict=True):
                answer = alike.model_copy(update={"signal": signal})  # checked once
                self._workers[member].answer = answer
                if not self._settings.overlaps:
                    self._arrivals.resumed(member, now_s)
                answers.append((self._workers[member].rank, answer))
        return answers

    def _place(self, rank: int) -> tuple[int, int]:
        """Stage and replica."""
        return rank % self._settings.stages, rank // self._settings.stages

    def _new_rule(self) -> StageRule:
        settings = self._settings
        replicas = len(self._workers) // settings.stages
        match settings.grouping:
            case "pairs":
                return WholePipelines(RandomPairs(replicas, seed=self._round), settings.stages)
            case "static":
                return WholePipelines(Static(replicas, settings.group_size), settings.stages)
            case "all":
                return WholePipelines(Static(replicas, replicas), settings.stages)
            case "scheduled":
                return Scheduled(settings.stages, replicas, settings.history, settings.window_s, self._arrivals)
