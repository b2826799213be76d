"""Exchange that sums tensors over all ranks beside the backward pass: a thread continues each sum as messages arrive.

A sum is a generator: it posts messages, yields those that it waits for, is sent them, and returns its result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import torch

from atoll.errors import AtollError, BadInput, PeerLost
from atoll.strategies.staged_sums.mailbox import Awaited, Message, StagedMailbox

JOIN_S: Final = 10.0
Result = TypeVar("Result")
Steps: TypeAlias = Generator[Awaited, list[Message], Result]
Post: TypeAlias = Callable[[int, int, Message], None]
"""(rank, stage, message)"""


class Sender(Protocol):
    """Sender of messages to other ranks: a run's Channel, or its Transport."""

    def send(self, to: int, number: int, tensor: int, count: int, payload: memoryview, /) -> None: ...


class StagedSum(Generic[Result]):
    """Sum of one tensor that is under way."""

    def __init__(self, tensor: int, steps: Steps[Result], ended: Callable[[object], None]) -> None:
        self.tensor, self.steps, self.ended = tensor, steps, ended
        self.awaited: Awaited | None = None
        self.result: Result | None = None
        self.done = threading.Event()


class StagedExchange:
    """Exchange of tensors. A thread of its own continues the sums; the training thread calls all public methods."""

    def __init__(self, sender: Sender, names: Sequence[str], largest: Sequence[int], stages: int) -> None:
        """Arguments: as of StagedMailbox."""
        self._sender = sender
        self._changed = threading.Condition()
        self._news = False
        self._submitted: deque[StagedSum[Any]] = deque()
        self._under_way: list[StagedSum[Any]] = []
        self._round = 0
        self._closed = False
        self._failure: BaseException | None = None
        self.mailbox = StagedMailbox(names, largest, stages, self._wake)
        self._thread = threading.Thread(target=self._run, name="atoll-sums", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, round_: int) -> None:
        """Begin a round. All sums of the previous round were finished, or are abandoned."""
        with self._changed:
            self._round = round_
            self._submitted.clear()
            self._under_way = []
        self.mailbox.begin(round_)

    def submit(self, tensor: int, steps: Steps[Result], ended: Callable[[object], None]) -> StagedSum[Result]:
        """Begin to sum a tensor. Its memory is the exchange's until `finish`."""
        sum_ = StagedSum(tensor, steps, ended)
        with self._changed:
            self._submitted.append(sum_)
            self._news = True
            self._changed.notify()
        return sum_

    def poster(self, tensor: int) -> Post:
        """Return the function by which the steps of a sum send messages of the present round."""
        number, send = self._round, self._sender.send
        return lambda to, stage, message: send(to, number, tensor, stage, memoryview(message))

    def finish(self, sum_: StagedSum[Result], deadline_s: float) -> Result:
        """Wait for a sum, and return its result. Raises PeerLost, BadInput."""
        ends_s = time.monotonic() + deadline_s
        while not sum_.done.wait(min(max(ends_s - time.monotonic(), 0.0), 1.0)):
            if not self._thread.is_alive() and not sum_.done.is_set():
                break
            if time.monotonic() >= ends_s:
                raise PeerLost(self._silence(sum_, deadline_s))
        if sum_.result is None:
            self._raise_failure()
        assert sum_.result is not None
        return sum_.result

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

    def _silence(self, sum_: StagedSum[Any], deadline_s: float) -> str:
        name, awaited = self.mailbox.names[sum_.tensor], sum_.awaited
        silent = self.mailbox.silent(sum_.tensor, awaited) if awaited is not None else None
        who = "no rank was asked for a message" if silent is None else f"rank {silent} sent nothing"
        return f"{who} of {name} for {deadline_s:.0f} s"

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify()

    # --- the exchange's own thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._await_news():
                    self._advance_all()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self._failure = error
        finally:
            with self._changed:
                sums = [*self._submitted, *self._under_way]
                self._closed = True
            for sum_ in sums:
                sum_.done.set()

    def _await_news(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._closed)
            self._news = False
            self._under_way += self._submitted
            self._submitted.clear()
            return not self._closed

    def _advance_all(self) -> None:
        """Continue as far as the received messages allow: first those that wait for nothing, in their order.

        A lost peer may have left once it had received everything, so its earlier messages count; an impossible message
        ends all sums."""
        broken = self.mailbox.broken
        if not isinstance(broken, BadInput):
            for sum_ in list(self._under_way):
                self._advance(sum_)
            with self._changed:
                self._under_way = [sum_ for sum_ in self._under_way if not sum_.done.is_set()]
        if broken is not None:
            raise broken

    def _advance(self, sum_: StagedSum[Any]) -> None:
        try:
            if sum_.awaited is None:
                sum_.awaited = next(sum_.steps)
            while (came := self.mailbox.take(sum_.tensor, sum_.awaited)) is not None:
                sum_.awaited = sum_.steps.send(came)
        except StopIteration as finished:
            sum_.result = finished.value
            sum_.ended(None)
            sum_.done.set()
        except BadInput as error:
            raise BadInput(f"{self.mailbox.names[sum_.tensor]}: {error}") from error
