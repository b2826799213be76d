"""The agreement of a pass: what all ranks know alike after it, whichever strategy trains.

Every rank proposes, as a backward pass begins, what it knows. After that pass, or `lag` passes later, all act on what
all proposed in it: the newest plan that everyone has, and whether anyone was asked to stop. Proposals travel beside
the gradients, so nobody waits a round trip for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.errors import BadInput

MAX_SAMPLES: Final = 2**40  # of an epoch, so that its number and a place in it fit one integer
MEETING_STEP: Final = 2**62
"""Beyond every step: proposals of a meeting carry it, plus the number of the meeting."""


class Meeting(StrEnum):
    """A call that all ranks make together, outside of what training exchanges."""

    SYNCHRONIZE = "run.synchronize"
    EVALUATION = "run.evaluation, or iterates run.evaluation_loader"
    SUM = "run.sum"
    GATHER = "run.gather"
    WEIGHT = "run.backward with a weight"
    END = "the end of its last epoch"

    @property
    def step(self) -> int:
        return MEETING_STEP + list(Meeting).index(self)


@dataclass(frozen=True, slots=True)
class MemoryProgress:
    """Of checkpoints in memory. One rank's, or what holds for all."""

    step: int = 0  # newest that is written; of all ranks the least
    every: int = 1  # steps from one to the next; of all ranks the most


@dataclass(frozen=True, slots=True)
class Agreed:
    """The outcome of one agreement, equal on all ranks."""

    plan_id: int  # every rank has the plans 1..plan_id
    stop: bool  # at least one rank was asked to stop
    memory: MemoryProgress = field(default_factory=MemoryProgress)
    view: int = 0  # a later one that every rank knows as the newest, to be left for at a boundary; 0: none


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank knows as a pass begins, and which batch it trains there. Each number fits an int64."""

    plan_id: int
    stop: int  # 0 or 1
    memory_step: int
    memory_every: int
    view: int
    step: int
    place: int  # epoch * MAX_SAMPLES + the batch's first sample in the epoch's order
    total: int  # samples of the batch of all ranks
    updates: int  # made by this rank before

    @staticmethod
    def of(batch: BatchSlice, own: Agreed, updates: int) -> Proposal:
        place = batch.epoch * MAX_SAMPLES + batch.start
        return Proposal(*Proposal._known(own), batch.step, place, batch.total, updates)

    @staticmethod
    def of_meeting(meeting: Meeting, own: Agreed, updates: int) -> Proposal:
        return Proposal(*Proposal._known(own), meeting.step, 0, 0, updates)

    @staticmethod
    def _known(own: Agreed) -> tuple[int, int, int, int, int]:
        return own.plan_id, int(own.stop), own.memory.step, own.memory.every, own.view

    @property
    def doing(self) -> str:
        """For messages: what the rank does that proposed this."""
        meeting = next((one for one in Meeting if one.step == self.step), None)
        return f"trains step {self.step}" if meeting is None else f"is at {meeting}"


class ProposalExchange(Protocol):
    """Brings each rank's proposal of a pass to all. Passes are numbered from 1. `propose` and `collect` raise
    PeerLost."""

    def propose(self, number: int, own: Proposal) -> None:
        """In pass `number`; does not wait."""

    def collect(self, number: int, deadline_s: float) -> Sequence[tuple[str, Proposal]]:
        """Wait for all ranks' proposals of pass `number`, each with who made it; or for the least and the greatest of
        each field. Those of earlier passes are forgotten."""

    def updated(self, updates: int) -> None:
        """This rank has made so many by now. What it waits for may be an update that another one is past making."""


class Agreement:
    """One for each run. Used by the training thread alone."""

    def __init__(self, exchange: ProposalExchange | None, agreed: Agreed, *, lag: int, deadline_s: float) -> None:
        """exchange: None in a run of one worker, which agrees with itself. agreed: what holds at first.
        lag: as the attribute."""
        self._exchange, self._agreed = exchange, agreed
        self._deadline_s = deadline_s
        self.lag = lag
        """Of so many passes back proposals are acted on; 0: of the pass itself. Set on all ranks in the same pass."""
        self._passes = self._acted_on = 0  # begun in this run; the one whose proposals `_agreed` is of
        self._updates = 0  # made in this run

    def propose(self, batch: BatchSlice, own: Agreed) -> None:
        """A pass begins. Raises PeerLost."""
        self._passes += 1
        if self._exchange is not None:
            self._exchange.propose(self._passes, Proposal.of(batch, own, self._updates))

    def updated(self) -> None:
        """optimizer.step() is done, or was left out by a GradScaler."""
        self._updates += 1
        if self._exchange is not None:
            self._exchange.updated(self._updates)

    def meet(self, meeting: Meeting, own: Agreed) -> None:
        """Wait until every rank calls this between the same two passes, and take up what all propose here.

        own: what this rank knows. Raises PeerLost; BadInput where another rank does something else, or has made another
        number of updates."""
        if self._exchange is not None:
            self.act()  # what is under way is collected first
            self._passes += 1
            self._exchange.propose(self._passes, Proposal.of_meeting(meeting, own, self._updates))
            self._agreed = merged(self._exchange.collect(self._passes, self._deadline_s))
            self._acted_on = self._passes

    def act(self) -> float:
        """After a pass, on every rank alike: take up what all proposed `lag` passes ago. Returns the seconds waited.

        Raises PeerLost where a rank does not answer in time, BadInput where ranks train different batches."""
        number = self._passes - self.lag
        if self._exchange is None or number <= self._acted_on:
            return 0.0
        begun_s = time.monotonic()
        proposals = self._exchange.collect(number, self._deadline_s)
        waited_s = time.monotonic() - begun_s
        self._acted_on, self._agreed = number, merged(proposals)
        return waited_s

    def reached(self, own: Agreed) -> Agreed:
        """What holds now. own: what this rank knows, which in a run of one is all there is to know."""
        return self._agreed if self._exchange is not None else own


def merged(proposals: Sequence[tuple[str, Proposal]]) -> Agreed:
    """What follows from the proposals of one pass. Pure. Raises BadInput where they are not of the same batch."""
    first_who, first = proposals[0]
    for who, one in proposals:
        if one.step != first.step and max(one.step, first.step) >= MEETING_STEP:
            raise BadInput(
                f"ranks are out of step: {first_who} {first.doing}, {who} {one.doing}. Every rank must make the same "
                "calls between the same two batches: take this one out of `if run.is_main:` and the like"
            )
        if one.step != first.step:
            raise BadInput(
                f"ranks are out of step: {first_who} is in step {first.step}, {who} in step {one.step}. Every rank "
                "must call run.backward equally often for each batch; do not skip batches on some ranks only"
            )
        if (one.place, one.total) != (first.place, first.total):
            epoch, start = divmod(first.place, MAX_SAMPLES)
            other_epoch, other_start = divmod(one.place, MAX_SAMPLES)
            raise BadInput(
                f"ranks train different batches in step {first.step}: {first_who} is at sample {start} of epoch "
                f"{epoch}, {who} at {other_start} of {other_epoch}. Every rank must leave the loop over the loader at "
                "the same batch: decide a break on what all ranks know alike, not on a local loss"
            )
        if one.updates != first.updates:
            raise BadInput(other_updates(first_who, first.updates, who, one.updates))
    memory = MemoryProgress(min(one.memory_step for _, one in proposals), max(one.memory_every for _, one in proposals))
    views = {one.view for _, one in proposals}
    view = views.pop() if len(views) == 1 else 0  # who knows of another one than the others tells them in a later pass
    return Agreed(min(one.plan_id for _, one in proposals), any(one.stop for _, one in proposals), memory, view)


def other_updates(who: str, updates: int, other_who: str, other: int) -> str:
    """What is said where ranks in the same pass have made different numbers of them."""
    return (
        f"ranks have made different numbers of updates: {who} {updates} in this run, {other_who} {other}. Every rank "
        "must call optimizer.step() equally often; decide to leave one out on what all ranks know alike, not on a "
        "local loss or gradient, or leave that to a torch.amp.GradScaler"
    )
