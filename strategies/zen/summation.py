"""Sum several tensors at once: each scheme continues as its messages come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from atoll.errors import BadInput
from atoll.strategies.staged_sums.mailbox import Awaited, StagedMailbox
from atoll.strategies.zen.coordinates import Coordinates, summed
from atoll.strategies.zen.messages import encode
from atoll.strategies.zen.partitions import HashPartitions
from atoll.strategies.zen.schemes import SUMS, Circle, Summing
from atoll.strategies.zen.tensor import SeparateTensor

Ended: TypeAlias = Callable[[object], None]
_INSIDE, _RESULT = 0, 1  # stages before those of a scheme


class Sum:
    """Sum of one tensor that is under way."""

    def __init__(self, tensor: SeparateTensor, steps: Summing, ended: Ended) -> None:
        self.tensor, self._steps, self._ended = tensor, steps, ended
        self.result: Coordinates | None = None
        self.awaited: Awaited | None = None

    def go_on(self, mailbox: StagedMailbox) -> None:
        """Continue as far as the received messages allow. Raises BadInput naming the tensor."""
        try:
            if self.awaited is None:
                self.awaited = next(self._steps)
            while (came := mailbox.take(self.tensor.number, self.awaited)) is not None:
                self.awaited = self._steps.send(came)
        except StopIteration as done:
            self.result = done.value
            self._ended(None)
        except BadInput as error:
            raise BadInput(f"{self.tensor.name}: {error}") from error


class Sender(Protocol):
    """Sender of messages to other ranks: a run's Channel, or its Transport."""

    def send(self, to: int, number: int, tensor: int, count: int, payload: memoryview, /) -> None: ...


class Summation:
    """Sums of a round. All methods run on the training thread."""

    def __init__(
        self, channel: Sender, mailbox: StagedMailbox, islands: Sequence[Sequence[int]], rank: int, seeds: Sequence[int]
    ) -> None:
        self._channel, self._mailbox, self._rank, self._seeds = channel, mailbox, rank, seeds
        own = next(tuple(ranks) for ranks in islands if rank in ranks)
        several = len(islands) > 1
        # Between islands the first rank of each takes part, for all of its island.
        self.circle = tuple(sorted(min(ranks) for ranks in islands)) if several else own
        self._leader, self._mates = (own[0], own[1:]) if several else (rank, ())
        self._round = 0
        self._under_way: list[Sum] = []
        self._hashed: dict[tuple[int, int], HashPartitions] = {}  # by the tensor's number, and how many there are

    def begin(self, round_: int) -> None:
        self._round = round_
        self._under_way.clear()
        self._mailbox.begin(round_)

    def start(self, tensor: SeparateTensor, mine: Coordinates, ended: Ended) -> Sum:
        """Post the first messages, and let the others continue."""
        sum_ = Sum(tensor, self._steps(tensor, mine), ended)
        self._under_way.append(sum_)
        self._go_on()
        return sum_

    def finish(self, sum_: Sum, deadline_s: float) -> Coordinates:
        """Wait for a tensor's sum. Raises PeerLost, BadInput."""
        while sum_.result is None:
            awaited = [(one.tensor.number, one.awaited) for one in self._under_way if one.awaited is not None]
            self._mailbox.wait(awaited, deadline_s)
            self._go_on()
        return sum_.result

    def _go_on(self) -> None:
        for sum_ in self._under_way:
            sum_.go_on(self._mailbox)
        self._under_way = [sum_ for sum_ in self._under_way if sum_.result is None]

    def _steps(self, tensor: SeparateTensor, mine: Coordinates) -> Summing:
        """Sum inside the island first, then between islands, then distribute inside."""
        post, shape, whole = partial(self._post, tensor.number), tensor.shape, self._hashed_of(tensor, 1)
        if self._rank != self._leader:
            post(self._leader, _INSIDE, _shortest(mine, whole))
            (message,) = yield Awaited(_RESULT, (self._leader,))
            return self._island(post).read(0, message, shape, 0, whole)
        if self._mates:
            came = yield Awaited(_INSIDE, self._mates)
            island = self._island(post)
            terms = [island.read(place, message, shape, 0, whole) for place, message in enumerate(came, start=1)]
            mine = summed([mine, *terms], shape)
        circle = Circle(self.circle, self.circle.index(self._rank), post)
        sum_ = yield from SUMS[tensor.scheme](circle, shape, self._hashed_of(tensor, len(self.circle)), mine)
        if self._mates:
            message = _shortest(sum_, whole)
            for mate in self._mates:
                post(mate, _RESULT, message)
        return sum_

    def _hashed_of(self, tensor: SeparateTensor, count: int) -> HashPartitions:
        key = tensor.number, count
        if key not in self._hashed:
            self._hashed[key] = HashPartitions(tensor.shape, self._seeds, count)
        return self._hashed[key]

    def _island(self, post: Callable[[int, int, memoryview], None]) -> Circle:
        ranks = (self._leader, *self._mates)
        return Circle(ranks, ranks.index(self._rank) if self._rank in ranks else 0, post)

    def _post(self, tensor: int, to: int, stage: int, message: memoryview) -> None:
        self._channel.send(to, self._round, tensor, stage, message)


def _shortest(mine: Coordinates, whole: HashPartitions) -> memoryview:
    """Return the coordinates of a tensor in one part."""
    return encode(mine, whole.shape, 0, whole.listed(0, len(mine.unit)))
