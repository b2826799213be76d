"""The agreement of a pass: what all ranks know alike after it, whichever strategy trains.

Every rank proposes, as a backward pass begins, what it knows. After that pass, or `lag` passes later, all act on what
all proposed in it: the newest plan that everyone has, and whether anyone was asked to stop. Proposals travel beside
the gradients, so nobody waits a round trip for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    UPDATE = "an optimizer.step() without a backward pass"

    @property
    def step(self) -> int:
        return MEETING_STEP + list(Meeting).index(self)


_MEETINGS: Final = {one.step: one for one in Meeting}


@dataclass(frozen=True, slots=True)
class MemoryProgress:
    """Progress of checkpoints in memory: of one rank, or agreed by all."""

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
    """The knowledge of one rank as a pass begins, and the batch that it trains. Each number fits an int64."""

    plan_id: int
    stop: int  # 0 or 1
    memory_step: int
    memory_every: int
    view: int
    step: int
    place: int  # epoch * MAX_SAMPLES + the batch's first sample in the epoch's order
    total: int  # samples of the batch of all ranks
    samples: int  # of the epoch; 0 of a stream
    skipped: int  # batches before, in this run, without a backward pass and without an update
    unreached: int  # updates in batches without a backward pass
    updates: int  # made by this rank before

    @staticmethod
    def of(batch: BatchSlice, own: Agreed, *, skipped: int = 0, unreached: int = 0, updates: int) -> Proposal:
        place = batch.epoch * MAX_SAMPLES + batch.start
        where = (batch.step, place, batch.total, batch.samples)
        return Proposal(*Proposal._known(own), *where, skipped, unreached, updates)

    @staticmethod
    def of_meeting(meeting: Meeting, own: Agreed, *, skipped: int = 0, unreached: int = 0, updates: int) -> Proposal:
        return Proposal(*Proposal._known(own), meeting.step, 0, 0, 0, skipped, unreached, updates)

    @staticmethod
    def _known(own: Agreed) -> tuple[int, int, int, int, int]:
        return own.plan_id, int(own.stop), own.memory.step, own.memory.every, own.view

    @property
    def meeting(self) -> Meeting | None:
        """The meeting that this is a proposal of; None for a pass."""
        return _MEETINGS.get(self.step)

    @property
    def doing(self) -> str:
        """Return, for messages, what the proposing rank is doing."""
        return f"trains step {self.step}" if self.meeting is None else f"is at {self.meeting}"


class ProposalExchange(Protocol):
    """Brings each rank's proposal of a pass to all. Passes are numbered from 1. `propose` and `collect` raise
    PeerLost."""

    def propose(self, number: int, own: Proposal) -> None:
        """Send the proposal of pass `number`. Does not wait."""

    def collect(self, number: int, deadline_s: float) -> Sequence[tuple[str, Proposal]]:
        """Wait for all ranks' proposals of pass `number`, each with who made it; or for the least and the greatest of
        each field. Those of earlier passes are forgotten."""

    @property
    def updated(self) -> Callable[[int, int], None] | None:
        """Call with the updates that this rank has made by now, and those of them without a pass. Raises BadInput as
        `check`. None where the next proposal is early enough: nobody waits for an update before it."""

    def check(self) -> None:
        """Raises BadInput where ranks are known to be in different passes. Does not wait."""


class Agreement:
    """One for each run. Used by the training thread alone."""

    def __init__(self, exchange: ProposalExchange | None, agreed: Agreed, *, lag: int, deadline_s: float) -> None:
        """exchange: None in a run of one worker, which agrees with itself. agreed: what holds at first.
        lag: as the attribute."""
        self._exchange, self._agreed = exchange, agreed
        self._report_update = exchange.updated if exchange is not None else None
        self._deadline_s = deadline_s
        self.lag = lag
        """Of so many passes back proposals are acted on; 0: of the pass itself. Set on all ranks in the same pass."""
        self._passes = self._acted_on = 0  # begun in this run; the one whose proposals `_agreed` is of
        self._updates = self._updates_before = 0  # made in this run; before the batch under way
        self._batch_passes = self._skipped = self._unreached = 0  # of the batch under way; the others as of Proposal
        self.must_meet = False
        """An update without a pass was made: another rank may wait in a pass, so a meeting precedes any collective."""

    def propose(self, batch: BatchSlice, own: Agreed) -> None:
        """A pass begins. Raises PeerLost."""
        self._passes += 1
        self._batch_passes += 1
        if self._exchange is not None:
            self._exchange.propose(self._passes, Proposal.of(batch, own, **self._counts()))

    def updated(self) -> None:
        """optimizer.step() is done, or was left out by a GradScaler. Raises BadInput as `ProposalExchange.check`."""
        self._updates += 1
        self._unreached += not self._batch_passes
        if self._report_update is not None:
            self._report_update(self._updates, self._unreached)

    def pass_alone(self) -> None:
        """A backward pass of the batch under way begins that is agreed upon with nobody."""
        self._batch_passes += 1

    def batch_over(self) -> None:
        """The script has done with a batch. After an update without a pass ranks meet before their next collective."""
        updated = self._updates > self._updates_before
        self._skipped += not self._batch_passes and not updated
        self.must_meet = self.must_meet or (not self._batch_passes and updated)
        self._batch_passes, self._updates_before = 0, self._updates

    def meet(self, meeting: Meeting, own: Agreed) -> None:
        """Wait until every rank calls this between the same two passes, and take up what all propose here.

        own: what this rank knows. Raises PeerLost; BadInput where another rank does something else, or has made another
        number of updates."""
        if self._exchange is not None:
            self.act()  # what is under way is collected first
            self._passes += 1
            self._exchange.propose(self._passes, Proposal.of_meeting(meeting, own, **self._counts()))
            self._agreed = merged(self._exchange.collect(self._passes, self._deadline_s))
            self._acted_on = self._passes
            self.must_meet = False

    def act(self) -> float:
        """Take up what all ranks proposed `lag` passes ago. Called after a pass on every rank; returns seconds waited.

        Raises PeerLost where a rank does not answer in time, BadInput where ranks train different batches."""
        number = self._passes - self.lag
        if self._exchange is None or number <= self._acted_on:
            return 0.0
        begun_s = time.monotonic()
        proposals = self._exchange.collect(number, self._deadline_s)
        waited_s = time.monotonic() - begun_s
        self._acted_on, self._agreed = number, merged(proposals)
        return waited_s

    def _counts(self) -> dict[str, int]:
        return {"skipped": self._skipped, "unreached": self._unreached, "updates": self._updates}

    def reached(self, own: Agreed) -> Agreed:
        """Return the agreed state. A single-rank run agrees with `own`."""
        return self._agreed if self._exchange is not None else own


def merged(proposals: Sequence[tuple[str, Proposal]]) -> Agreed:
    """Merge the proposals of one pass. Pure. Raises BadInput if they are not of the same batch."""
    first_who, first = proposals[0]
    for who, one in proposals:
        if (apart := why_apart(first_who, first, who, one)) is not None:
            raise BadInput(apart)
    memory = MemoryProgress(min(one.memory_step for _, one in proposals), max(one.memory_every for _, one in proposals))
    views = {one.view for _, one in proposals}
    view = views.pop() if len(views) == 1 else 0  # who knows of another one than the others tells them in a later pass
    return Agreed(min(one.plan_id for _, one in proposals), any(one.stop for _, one in proposals), memory, view)


def why_apart(who: str, one: Proposal, other_who: str, other: Proposal) -> str | None:
    """Return why two ranks' proposals of a pass cannot go together, with the next step; None where they can."""
    meets = [one.meeting is not None, other.meeting is not None]
    if not all(meets) and (left_out := _left_out(who, one, other_who, other)) is not None:
        return left_out
    if one.step != other.step and any(meets):
        return _elsewhere(who, one, other_who, other)
    if one.samples != other.samples:
        return (
            f"the dataset has {one.samples} samples on {who} and {other.samples} on {other_who} in epoch "
            f"{one.place // MAX_SAMPLES}. Where its length changes between two epochs, change it alike on every "
            "rank: by the epoch's number, not by what one rank has seen"
        )
    if one.step != other.step:
        return (
            f"ranks are out of step: {who} is in step {one.step}, {other_who} in step {other.step}. Every rank "
            "must call run.backward equally often for each batch, and under run.no_sync() in the same passes"
        )
    if (one.place, one.total) != (other.place, other.total):
        return _other_batches(who, one, other_who, other)
    return other_updates(who, one.updates, other_who, other.updates) if one.updates != other.updates else None


def _left_out(who: str, one: Proposal, other_who: str, other: Proposal) -> str | None:
    """Explain batches of which one rank made no backward pass and the other did. At least one of both trains."""
    step = max(each.step for each in (one, other) if each.meeting is None)
    if one.unreached != other.unreached:
        found = who if one.unreached > other.unreached else other_who
        return (
            f"{found} called optimizer.step() for a batch of which no backward pass reached a parameter of the model, "
            f"at or before step {step}: its loss does not depend on the prepared model, or "
            "backward was left out. Others wait for its gradients. Compute every rank's loss from the model that "
            "run.prepare gave back; where a rank has nothing to learn from a batch, multiply its loss by 0"
        )
    if one.skipped != other.skipped:
        found = who if one.skipped > other.skipped else other_who
        return (
            f"{found} skipped a batch that others trained, before step {step}: it made no "
            "backward pass of it that reached a parameter of the model. Every rank must call backward for each batch: "
            "in place of `continue`, multiply the loss by 0, or decide it on what all ranks know alike (run.sum)"
        )
    return None


def _elsewhere(who: str, one: Proposal, other_who: str, other: Proposal) -> str:
    """Explain that a rank trains where the other meets, or that they meet for different calls."""
    said = f"ranks are out of step: {who} {one.doing}, {other_who} {other.doing}. "
    if {one.meeting, other.meeting} != {None, Meeting.END}:
        return said + (
            "Every rank must make the same calls between the same two batches: take this one out of `if run.is_main:` "
            "and the like"
        )
    if max(one.samples, other.samples) == 0:
        return said + _STREAMS
    return (
        said + "Every rank must train the same batches of as many epochs: decide a break on what all ranks know alike"
    )


def _other_batches(who: str, one: Proposal, other_who: str, other: Proposal) -> str:
    (epoch, start), (other_epoch, other_start) = divmod(one.place, MAX_SAMPLES), divmod(other.place, MAX_SAMPLES)
    said = (
        f"ranks train different batches in step {one.step}: {who} is at sample {start} of epoch {epoch}, {other_who} "
        f"at {other_start} of {other_epoch}. "
    )
    if one.samples == 0 and (epoch != other_epoch or one.total != other.total):
        return said + _STREAMS
    return said + (
        "Every rank must leave the loop over the loader at the same batch: decide a break on what all ranks know "
        "alike, not on a local loss"
    )


_STREAMS: Final = (
    "The stream is not as long on every rank. Every worker must read the same whole stream, of which Atoll gives each "
    "its part: do not split it by rank, and cut all to the same length, e.g. with itertools.islice"
)


def other_updates(who: str, updates: int, other_who: str, other: int) -> str:
    """Return the message for ranks that made different numbers of updates before the same pass."""
    return (
        f"ranks have made different numbers of updates: {who} {updates} in this run, {other_who} {other}. Every rank "
        "must call optimizer.step() equally often; decide to leave one out on what all ranks know alike, not on a "
        "local loss or gradient, or leave that to a torch.amp.GradScaler"
    )
