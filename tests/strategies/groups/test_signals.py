"""A replica's line to the scheduler: what ends its wait for a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import pytest

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.model.places import StagePlace
from atoll.errors import PeerLost
from atoll.strategies.declaration import Declared
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.signals import Signals


class Line:
    """A StrategyChannel that answers each message at once."""

    answers = True

    def __init__(self, answers: Callable[[GroupsMessage], Iterable[GroupsMessage]]) -> None:
        self._answers = answers
        self._heard: Callable[[Declared], None] = lambda message: None

    def listen(self, heard: Callable[[Declared], None]) -> None:
        self._heard = heard

    def tell(self, message: GroupsMessage) -> None:
        for answer in self._answers(message):
            self._heard(answer)


def signals(answers: Callable[[GroupsMessage], Iterable[GroupsMessage]], deadline_s: float = 60.0) -> Signals:
    """Return those of one of two replicas, in view 3; `fail` is what it is left out by."""
    line = cast("StrategyChannel", Line(answers))
    made = Signals(line, 3, StagePlace.of(1, 2, 1), lambda reason: made.fail(reason), deadline_s)  # noqa: PLW0108
    return made


def test_a_replica_that_the_others_lost_does_not_wait_for_them() -> None:
    """1. The others go on without this replica, which was only slow. 2. Its wait for a group with them ends. 3. In a
    later view nobody left it out."""
    with pytest.raises(PeerLost, match="the other replicas lost this one"):
        signals(lambda said: [GroupsMessage(view=3, lost=True)]).ready()
    answer = signals(
        lambda said: [GroupsMessage(view=2, lost=True), GroupsMessage(view=3, signal=said.signal, group=1)]
    ).ready()
    assert answer is not None
    assert answer.group == 1


def test_a_wait_for_a_group_has_a_deadline_though_the_scheduler_answers() -> None:
    with pytest.raises(PeerLost, match="no group was formed with this replica for 0 s"):
        signals(lambda said: [GroupsMessage(view=3, signal=said.signal, waits=True)], deadline_s=0.1).ready()


def test_the_scheduler_is_told_of_a_lost_replica_at_once() -> None:
    """Also by one that waits for nothing: the lost one may live, and wait for it."""
    told: list[GroupsMessage] = []
    signals(lambda said: told.append(said) or []).lose(0)  # type: ignore[func-returns-value]
    assert [(one.ended, one.signal) for one in told] == [([0], 0)]
