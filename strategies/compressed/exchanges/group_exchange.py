"""Thread that exchanges groups beside the backward pass, and its interface to the training thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from atoll.agent.runtime.channel.channel import Channel
from atoll.errors import AtollError, BadInput, PeerLost
from atoll.strategies.compressed.codes.compressors import Compressor
from atoll.strategies.compressed.exchanges.group_sum import Addend, Counts, GroupGradient, GroupSum, RankCircle, Summing
from atoll.strategies.compressed.groups.options import Way
from atoll.strategies.staged_sums.mailbox import Awaited, Message, StagedMailbox

JOIN_S: Final = 10.0


class ExchangedGroup:
    """Sum of one group that is under way."""

    def __init__(self, tensor: int, sum_: GroupSum, way: Way, ended: Callable[[object], None]) -> None:
        self.tensor, self.sum, self.way, self.ended = tensor, sum_, way, ended
        self.steps: Summing | None = None
        self.awaited: Awaited | None = None
        self.addends: list[Addend] | None = None
        self.counts: Counts | None = None
        self.done = threading.Event()

    def add_up(self) -> None:
        """Decode the received messages."""
        assert self.addends is not None
        self.counts = self.sum.add_up(self.addends)


class GroupExchange:
    """Exchange of groups. `submit` and `finish` run on the training thread; a thread of its own compresses, posts,
    waits and decodes."""

    def __init__(self, channel: Channel, mailbox_of: Callable[[Callable[[], None]], StagedMailbox]) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._news = False
        self._submitted: deque[ExchangedGroup] = deque()
        self._under_way: list[ExchangedGroup] = []
        self._round = 0
        self._closed = False
        self._failure: BaseException | None = None
        self.mailbox = mailbox_of(self._wake)
        self._thread = threading.Thread(target=self._run, name="atoll-compressed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, round_: int) -> None:
        """Begin a round. All sums of the previous round were finished, or are abandoned."""
        with self._changed:
            self._round = round_
            self._submitted.clear()
            self._under_way = []
        self.mailbox.begin(round_)

    def submit(
        self,
        tensor: int,
        circle: RankCircle,
        compressor: Compressor,
        mine: GroupGradient,
        *,
        way: Way,
        ended: Callable[[object], None],
    ) -> ExchangedGroup:
        """Begin to sum a group, named by its first tensor. Its memory is the exchange's until `finish`."""
        post = partial(self._post, tensor)
        group = ExchangedGroup(tensor, GroupSum(circle, compressor, mine, post, divisible=way.divisible), way, ended)
        if way.compress == "device":
            group.sum.compress()
            group.steps = group.sum.steps()
        with self._changed:
            self._submitted.append(group)
            self._news = True
            self._changed.notify()
        return group

    def finish(self, group: ExchangedGroup, deadline_s: float) -> Counts:
        """Wait until the sum is in the group's memory. Returns the counts. Raises PeerLost, BadInput."""
        ends_s = time.monotonic() + deadline_s
        while not group.done.wait(min(max(ends_s - time.monotonic(), 0.0), 1.0)):
            if not self._thread.is_alive() and not group.done.is_set():
                break
            if time.monotonic() >= ends_s:
                raise PeerLost(self._silence(group, deadline_s))
        if group.addends is None:
            self._raise_failure()
        if group.counts is None:
            group.add_up()
        assert group.counts is not None
        return group.counts

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _raise_failure(self) -> None:
        error = self._failure or self.mailbox.broken
        if isinstance(error, AtollError):
            raise type(error)(str(error)) from error
        raise PeerLost("the exchange has ended") from error

    def _silence(self, group: ExchangedGroup, deadline_s: float) -> str:
        name, awaited = self.mailbox.names[group.tensor], group.awaited
        silent = self.mailbox.silent(group.tensor, awaited) if awaited is not None else None
        who = "nobody was asked" if silent is None else f"rank {silent} sent nothing"
        return f"{who} of the group of {name} for {deadline_s:.0f} s"

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify()

    def _post(self, tensor: int, to: int, stage: int, message: Message) -> None:
        self._channel.send(to, self._round, tensor, stage, message)

    # --- the exchange's own thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._await_news():
                    self._go_on()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self._failure = error
        finally:
            with self._changed:
                groups = [*self._submitted, *self._under_way]
                self._closed = True
            for group in groups:
                group.done.set()

    def _await_news(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._closed)
            self._news = False
            self._under_way += self._submitted
            self._submitted.clear()
            return not self._closed

    def _go_on(self) -> None:
        """Continue as far as the received messages allow: first those that wait for nothing, in their order."""
        if self.mailbox.broken is not None:
            self._end_what_is_complete()
            raise self.mailbox.broken
        for group in list(self._under_way):
            self._advance(group)
        with self._changed:
            self._under_way = [group for group in self._under_way if not group.done.is_set()]

    def _end_what_is_complete(self) -> None:
        """Handle the loss of a peer. It may leave once it has received everything: its earlier messages count."""
        if isinstance(self.mailbox.broken, BadInput):
            return
        for group in list(self._under_way):
            self._advance(group)
        if all(group.done.is_set() for group in self._under_way):
            self._under_way = []

    def _advance(self, group: ExchangedGroup) -> None:
        name = self.mailbox.names[group.tensor]
        try:
            if group.steps is None:
                group.sum.compress()
                group.steps = group.sum.steps()
            if group.awaited is None:
                group.awaited = next(group.steps)
            while (came := self.mailbox.take(group.tensor, group.awaited)) is not None:
                group.awaited = group.steps.send(came)
        except StopIteration as finished:
            group.addends = finished.value
            if group.way.decompress == "cpu":
                group.add_up()
            group.ended(None)
            group.done.set()
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from error
