"""A replica's line to the scheduler: says that it is ready, and waits for its group as long as somebody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.strategies.declaration import Declared
from atoll.strategies.groups.messages import GroupsMessage

REPEAT_S: Final = 0.5  # a signal, or its answer, may be lost
AWAY_S: Final = 3.0  # the controller is away if it says nothing for so long


class Signals:
    """`_heard` runs on the link's thread, the rest on the training thread.

    While the controller is away nobody waits for it: the replica trains on alone until the round's end, where all
    average. Every signal is still sent; the first answer ends that."""

    def __init__(self, scheduler: StrategyChannel) -> None:
        self._scheduler = scheduler
        self._changed = threading.Condition()
        self._answer: GroupsMessage | None = None
        self._heard_s = 0.0
        self._away = not scheduler.answers
        self._round = 0
        self.newest = 0
        """The signal that was given last."""
        scheduler.listen(self._heard)

    def begin(self, round_: int) -> None:
        self._round = round_

    def ready(self, ended: Callable[[], tuple[int, ...]]) -> GroupsMessage | None:
        """The group that answers; None where nobody does. ended: ranks that train no more in this round; raises where
        waiting is in vain."""
        with self._changed:
            self.newest += 1
            self._answer = None
            self._heard_s = time.monotonic()
            away = self._away
        self._tell(ended())
        while not away:
            with self._changed:
                if self._changed.wait_for(lambda: self._answer is not None, REPEAT_S):
                    return self._answer
                away = self._away = time.monotonic() - self._heard_s > AWAY_S
            self._tell(ended())
        return None

    def done(self) -> None:
        """Nothing is left to train in this round."""
        self._scheduler.tell(GroupsMessage(round=self._round, done=True))

    def _tell(self, ended: tuple[int, ...]) -> None:
        self._scheduler.tell(GroupsMessage(round=self._round, signal=self.newest, ended=list(ended)))

    def _heard(self, message: Declared) -> None:
        assert isinstance(message, GroupsMessage)
        with self._changed:
            self._heard_s = time.monotonic()
            self._away = False
            if message.signal == self.newest and not message.waits:
                self._answer = message
                self._changed.notify_all()
