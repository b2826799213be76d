"""Carries each rank's proposals to all others: beside all-reduced gradients, or as messages of the run's channel."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter
from typing import Final

import torch

from atoll.agent.runtime.agent_link.waiting import waiting
from atoll.agent.runtime.channel.agreement import Proposal, merged, why_apart
from atoll.agent.runtime.transport.collectives import UnderWay
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput, PeerLost

_PROPOSAL: Final = struct.Struct("<QBQQQQQQQQQQ")  # the fields of a Proposal
_numbers: Final = attrgetter(*(field.name for field in fields(Proposal)))
KEPT_PASSES: Final = 32
"""More than twice the passes that proposals may be late: a peer may be as far ahead of what is acted on here."""
_DOING: Final = "agreeing on the plan"


class ReducedProposals:
    """One MIN all-reduce of 24 integers, each field and its negative, on a group of its own: it overlaps the backward
    pass and never waits behind gradients. `collect` follows each `propose`."""

    updated = None

    def __init__(self, group: Group) -> None:
        self._group = group
        self._bounds = torch.empty(0, dtype=torch.int64)
        self._under_way: UnderWay | None = None

    def propose(self, number: int, own: Proposal) -> None:
        numbers = _numbers(own)
        self._bounds = torch.tensor([*numbers, *(-one for one in numbers)], dtype=torch.int64)
        self._under_way = self._group.begin_least(self._bounds, _DOING)

    def collect(self, number: int, deadline_s: float) -> Sequence[tuple[str, Proposal]]:
        """The least and the greatest of each field."""
        # A handle that is kept leaves gloo's connections open after the end of its group.
        under_way, self._under_way = self._under_way, None
        assert under_way is not None  # propose came first
        under_way.wait()
        bounds = [int(one) for one in self._bounds.tolist()]
        half = len(bounds) // 2
        return [("one rank", Proposal(*bounds[:half])), ("another rank", Proposal(*(-one for one in bounds[half:])))]

    def check(self) -> None:
        """A rank that refused this pass has ended: its peers find the cause in the same numbers."""
        if self._under_way is not None and self._under_way.work.is_completed():
            with suppress(PeerLost):
                merged(self.collect(0, 0.0))


class BroadcastProposals:
    """One message to every other rank. `hear` and `fail` run on the transport's thread, the rest on the training
    thread."""

    def __init__(self, rank: int, world_size: int, broadcast: Callable[[int, bytes], None]) -> None:
        """broadcast: hand (pass, payload) to all other ranks."""
        self._rank, self._world_size, self._broadcast = rank, world_size, broadcast
        self._heard: dict[int, dict[int, Proposal]] = {}
        self._done = 0  # passes up to this one were acted on
        self._broken: str | None = None
        self._updates = self._unreached = 0  # that this rank made by now, and those without a pass
        self._differs: str | None = None
        self._changed = threading.Condition()

    def propose(self, number: int, own: Proposal) -> None:
        with self._changed:
            self._heard.setdefault(number, {})[self._rank] = own
            self._compare(number)
        if self._world_size > 1:
            self._broadcast(number, _PROPOSAL.pack(*_numbers(own)))
        self.check()

    def hear(self, number: int, rank: int, payload: bytes | memoryview) -> str | None:
        """A peer's proposal. Returns why it was refused, None if it was taken."""
        if len(payload) != _PROPOSAL.size or not 0 <= rank < self._world_size or rank == self._rank:
            return "malformed"
        with self._changed:
            if number <= self._done:
                return "old step"
            if number > self._done + KEPT_PASSES:
                return "step too far ahead"
            if rank in self._heard.setdefault(number, {}):
                return "twice"
            self._heard[number][rank] = Proposal(*_PROPOSAL.unpack(payload))
            self._compare(number)
            self._changed.notify_all()
        return None

    def updated(self, updates: int, unreached: int) -> None:
        with self._changed:
            self._updates, self._unreached = updates, unreached
            for number in self._heard:
                self._compare(number)
        self.check()

    @property
    def differs(self) -> str | None:
        """Return why a peer is in another pass than this rank, once a proposal showed it."""
        with self._changed:
            return self._differs

    def check(self) -> None:
        """Raises BadInput where a peer's proposal of a pass cannot go together with this rank's."""
        if (differs := self.differs) is not None:
            raise BadInput(differs)

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def collect(self, number: int, deadline_s: float) -> Sequence[tuple[str, Proposal]]:
        with self._changed, waiting:
            self._changed.wait_for(lambda: self._differs or self._broken or self._complete(number), deadline_s)
            heard = self._heard.get(number, {})
            if self._differs is not None:
                raise BadInput(self._differs)
            if not self._complete(number):
                silent = next(rank for rank in range(self._world_size) if rank not in heard)
                raise PeerLost(self._broken or f"rank {silent} said nothing of pass {number} for {deadline_s:.0f} s")
            self._done = number
            for old in [one for one in self._heard if one <= number]:
                del self._heard[old]
        return [(f"rank {rank}", heard[rank]) for rank in range(self._world_size)]

    def _compare(self, number: int) -> None:
        """Compare updates. A rank that began this pass has made all updates before it. A rank that waits for an
        update has not begun the pass, and has made fewer than it will have then."""
        heard = self._heard[number]
        for rank, theirs in heard.items():
            own = heard.get(self._rank) or replace(
                theirs,
                updates=max(self._updates, theirs.updates),
                unreached=max(self._unreached, theirs.unreached),
            )
            self._differs = self._differs or why_apart(f"rank {self._rank}", own, f"rank {rank}", theirs)

    def _complete(self, number: int) -> bool:
        return len(self._heard.get(number, {})) == self._world_size
