"""A replica's line to the scheduler: says that it is ready, and waits for its group as long as somebody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.model.places import StagePlace
from atoll.errors import PeerLost
from atoll.strategies.declaration import Declared
from atoll.strategies.groups.messages import GroupsMessage

REPEAT_S: Final = 0.5  # a signal, or its answer, may be lost
AWAY_S: Final = 3.0  # the controller is away if it says nothing for so long


class Signals:
    """`_heard` runs on the link's thread, `lose` and `fail` on the wire's, the rest on the training thread.

    While the controller is away nobody waits for it: the replica trains on alone until the round's end, where all
    average. Every signal is still sent; the first answer ends that."""

    def __init__(
        self,
        scheduler: StrategyChannel,
        view: int,
        place: StagePlace,
        left_out: Callable[[str], None],
        deadline_s: float,
    ) -> None:
        """left_out: called on the link's thread with the reason where the other replicas go on without this one.
        deadline_s: the longest wait for a group."""
        self._scheduler, self._view, self._place = scheduler, view, place
        self._left_out, self._deadline_s = left_out, deadline_s
        self._lost: tuple[int, ...] = ()
        self._broken: PeerLost | None = None
        self._changed = threading.Condition()
        self._answer: GroupsMessage | None = None
        self._heard_s = 0.0
        self._away = not scheduler.answers
        self._round, self._done = 0, False
        self.newest = 0
        """The signal that was given last."""
        scheduler.listen(self._heard)

    def begin(self, round_: int) -> None:
        self._round, self._done = round_, False

    def ready(self) -> GroupsMessage | None:
        """The group that answers; None where nobody does. Raises PeerLost where waiting is in vain."""
        with self._changed:
            self.newest += 1
            self._answer = None
            self._heard_s = time.monotonic()
            away, ends_s = self._away or self._done, self._heard_s + self._deadline_s
            if self._done:
                return None  # what others left is trained when no groups are formed any more
        self._tell()
        while not away:
            with self._changed:
                self._changed.wait_for(lambda: self._answer is not None or self._broken is not None, REPEAT_S)
                if self._broken is not None:
                    raise self._broken
                if self._answer is not None:
                    return self._answer
                now_s = time.monotonic()
                away = self._away = now_s - self._heard_s > AWAY_S
            if now_s > ends_s:
                raise PeerLost(f"no group was formed with this replica for {self._deadline_s:.0f} s")
            self._tell()
        return None

    def done(self) -> None:
        """Nothing is left to train in this round, but for what lost replicas left. May be said again."""
        self._done = True
        self._scheduler.tell(self._message(done=True))

    def lose(self, rank: int) -> None:
        with self._changed:
            self._lost = (*self._lost, rank)
        self._scheduler.tell(self._message(ended=list(self._lost)))  # at once: the lost one may live, and wait

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    def _tell(self) -> None:
        self._scheduler.tell(self._message(signal=self.newest, ended=list(self._lost)))

    def _message(self, **said: Any) -> GroupsMessage:
        place = self._place
        workers = place.stages * place.pipelines
        return GroupsMessage(view=self._view, rank=place.rank, workers=workers, round=self._round, **said)

    def _heard(self, message: Declared) -> None:
        assert isinstance(message, GroupsMessage)
        if message.lost and message.view == self._view:
            self._left_out("the other replicas lost this one, and go on without it")
            return
        with self._changed:
            self._heard_s = time.monotonic()
            self._away = False
            if message.view == self._view and message.signal == self.newest and not message.waits:
                self._answer = message
                self._changed.notify_all()
