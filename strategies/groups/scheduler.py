"""Scheduler of strategy `groups`: answers the replicas' signals with groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.planners.group_rounds import GroupRounds, RoundGroup, departed, passed, ready
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.rules import ArrivalTimes, GroupRule, Members, RandomPairs, Static
from atoll.strategies.groups.settings import Groups

FIRST_WINDOW_S: Final = 0.1  # as long as nobody's iterations were measured
WIDEST: Final = 1.5  # windows, where somebody is late whom it was opened for


class Scheduled:
    """SDPipe's. history = 1 is the all-reduce: nobody goes on before all are ready.

    A window is not kept open for those who will not come in it: arrivals are predicted, and it ends with the last one
    that is expected. It is widened where one of these is late."""

    def __init__(self, replicas: int, history: int, window_s: float, arrivals: ArrivalTimes) -> None:
        """window_s: 0: by the iterations' time. All replicas are equal as the round begins."""
        rounds = GroupRounds.of(1, replicas, history)
        (stage,) = rounds.stages
        met = (stage.live,) if history > 1 else ()
        self._rounds = replace(rounds, stages=(replace(stage, recent=met),))
        self._window_s, self._arrivals, self._replicas = window_s, arrivals, replicas

    @property
    def due_s(self) -> float | None:
        return self._rounds.due_s

    def ready(self, replica: int, now_s: float) -> list[Members]:
        (stage,) = self._rounds.stages
        if replica not in stage.live:
            return []  # it said before that it was done
        window_s = self._window(replica, now_s) if not stage.ready else 0.0
        self._rounds, formed = ready(self._rounds, 0, replica, now_s, window_s)
        return _members(formed)

    def done(self, replica: int, now_s: float) -> list[Members]:
        self._rounds, formed = departed(self._rounds, 0, replica, now_s)
        return _members(formed)

    def passed(self, now_s: float) -> list[Members]:
        self._rounds, formed = passed(self._rounds, now_s)
        return _members(formed)

    def _window(self, first: int, now_s: float) -> float:
        """Of one that the replica `first` opens now."""
        iteration_s = self._arrivals.iteration_s()
        longest_s = self._window_s or (FIRST_WINDOW_S if iteration_s is None else iteration_s / self._replicas)
        if iteration_s is None:
            return longest_s
        (stage,) = self._rounds.stages
        expected = [self._arrivals.expected(replica) for replica in stage.live - {first}]
        surely_s = [each[1] for each in expected if each is not None and each[0] <= now_s + longest_s]
        return min(max(0.0, *surely_s) - now_s, WIDEST * longest_s) if surely_s else 0.0


@dataclass(slots=True)
class _Replica:
    signal: int = 0  # the newest
    answer: GroupsMessage | None = None  # of it


class GroupScheduler:
    """Of one run. Signals may come late, twice, or not at all; an answer that was lost is given again."""

    def __init__(self, settings: Groups, world_size: int) -> None:
        self._settings, self._replicas = settings, [_Replica() for _ in range(world_size)]
        self._arrivals = ArrivalTimes()
        self._round, self._groups = -1, 0
        self._rule: GroupRule = self._new_rule()

    @property
    def due_s(self) -> float | None:
        return self._rule.due_s

    def heard(self, rank: int, message: GroupsMessage, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        if message.round > self._round:  # all have averaged together at the end of the round before
            self._round, self._groups, self._rule = message.round, 0, self._new_rule()
        if message.round < self._round:
            return []
        formed = [group for ended in message.ended for group in self._rule.done(ended, now_s)]
        return [*self._answers(formed, now_s), *self._answer(rank, message, now_s)]

    def passed(self, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        return self._answers(self._rule.passed(now_s), now_s)

    def _answer(self, rank: int, message: GroupsMessage, now_s: float) -> Iterable[tuple[int, GroupsMessage]]:
        replica = self._replicas[rank]
        if message.signal > replica.signal:
            replica.signal, replica.answer = message.signal, None
            self._arrivals.ready(rank, now_s)
            return self._answers(self._rule.ready(rank, now_s), now_s)
        if message.done:
            return self._answers(self._rule.done(rank, now_s), now_s)
        if message.signal < replica.signal or not message.signal:
            return []
        waits = GroupsMessage(round=self._round, signal=replica.signal, waits=True)
        return [(rank, replica.answer or waits)]

    def _answers(self, formed: list[Members], now_s: float) -> list[tuple[int, GroupsMessage]]:
        answers = []
        for members in formed:
            self._groups += 1
            signals = [self._replicas[member].signal for member in members]
            alike = GroupsMessage(round=self._round, group=self._groups, members=list(members), signals=signals)
            for member, signal in zip(members, signals, strict=True):
                answer = alike.model_copy(update={"signal": signal})  # checked once
                self._replicas[member].answer = answer
                self._arrivals.goes_on(member, now_s)
                answers.append((member, answer))
        return answers

    def _new_rule(self) -> GroupRule:
        settings, replicas = self._settings, len(self._replicas)
        match settings.grouping:
            case "pairs":
                return RandomPairs(replicas, seed=self._round)
            case "static":
                return Static(replicas, settings.group_size)
            case "all":
                return Scheduled(replicas, 1, 0.0, self._arrivals)
            case "scheduled":
                return Scheduled(replicas, settings.history, settings.window_s, self._arrivals)


def _members(formed: list[RoundGroup]) -> list[Members]:
    return [group.members for group in formed]
