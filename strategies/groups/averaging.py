"""Averages the state of a group's members, peer to peer: each sums a slice for all.

A member sends each other one the slice that this one averages, and gets its averaged slice: 2 (k - 1) / k states leave
a member of k, as in a ring, in two exchanges. One that declines (its answer from the scheduler was lost, and it went
on) does so to everyone, so the others average without it, all of them. Where one is lost on the way, either somebody
has made the average with it, and gives it to the others; or nobody has, and they average without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.strategies.groups.mailbox import MadeAverage, PartMailbox, PartMessage, Purpose, packed

F32 = npt.NDArray[np.float32]

MAX_MEMBERS: Final = 64  # that an attempt's bits tell apart


@dataclass(frozen=True, slots=True)
class Average:
    """state_N: float32 [N]. replicas: how many equal weights would average as these do, (sum w)^2 / sum w^2. batches:
    bits of those of the round that are in it."""

    state_N: F32
    members: tuple[int, ...]
    replicas: float
    batches: int


@dataclass(frozen=True, slots=True)
class Grouped:
    """number: in the round. signals: that the group answers, by member, ascending; 0: it may not decline."""

    round: int
    number: int
    signals: Mapping[int, int]


class Averaging:
    """Used by the training thread."""

    def __init__(
        self, rank: int, send: Callable[[int, int, int, int, bytes], None], size: int, deadline_s: float
    ) -> None:
        """send: to rank, (round, group, signal of that rank, payload). size: entries of a state."""
        self._rank, self._send, self._deadline_s = rank, send, deadline_s
        self.mailbox = PartMailbox(size, send)

    def average(self, group: Grouped, state_N: F32, weight: float, batches: int = 0) -> Average | None:
        """The average of the members that take part, weighted; the same bits on each. None: nobody else does.

        weight: of this rank; where all are 0 they count alike. batches: bits of those in its state. Raises PeerLost."""
        while True:
            if (found := self.mailbox.whole(group.number)) is not None:
                return self._made(group, *found)
            declined = self.mailbox.declined(group.number)
            active = [member for member in group.signals if member not in declined]
            if active == [self._rank]:
                return None
            averaged = self._attempt(group, active, state_N, weight, batches)
            if averaged is not None:
                return averaged

    def _made(self, group: Grouped, attempt: int, whole: PartMessage) -> Average:
        self.mailbox.averaged(MadeAverage(group.round, group.number, attempt, whole), group.signals[self._rank])
        members = tuple(member for place, member in enumerate(group.signals) if attempt >> place & 1)
        return Average(whole.slice_N, members, whole.weight, whole.batches)

    def _attempt(
        self, group: Grouped, active: Sequence[int], state_N: F32, weight: float, batches: int
    ) -> Average | None:
        """None: another member has declined or is lost."""
        attempt = sum(1 << place for place, member in enumerate(group.signals) if member in active)
        bounds = np.linspace(0, len(state_N), len(active) + 1).astype(np.int64)
        others = [member for member in active if member != self._rank]
        for place, member in enumerate(active):
            if member != self._rank:
                slice_N = state_N[bounds[place] : bounds[place + 1]]
                payload = packed(Purpose.PART, attempt, weight, batches, [slice_N])
                self._send(member, group.round, group.number, group.signals[member], payload)
        parts = self.mailbox.collect(group.number, Purpose.PART, attempt, others, self._deadline_s)
        if parts is None:
            return None
        own = active.index(self._rank)
        weights = [weight if member == self._rank else parts[member].weight for member in active]
        slices = [
            state_N[bounds[own] : bounds[own + 1]] if member == self._rank else parts[member].slice_N
            for member in active
        ]
        mean_N = weighted_mean(slices, weights)
        payload = packed(Purpose.RESULT, attempt, slices=[mean_N])
        for member in others:
            self._send(member, group.round, group.number, group.signals[member], payload)
        results = self.mailbox.collect(group.number, Purpose.RESULT, attempt, others, self._deadline_s)
        if results is None:
            return None
        whole_N = np.concatenate([mean_N if member == self._rank else results[member].slice_N for member in active])
        for part in parts.values():
            batches |= part.batches
        return self._made(group, attempt, PartMessage(alike(weights), batches, whole_N))


def weighted_mean(slices: Sequence[F32], weights: Sequence[float]) -> F32:
    """float32 [N], added up in the order given, so that it has the same bits wherever it is made."""
    shares = [np.float32(one) for one in shares_of(weights)]
    mean_N = slices[0] * shares[0]
    for slice_N, share in zip(slices[1:], shares[1:], strict=True):
        mean_N += slice_N * share
    return mean_N


def shares_of(weights: Sequence[float]) -> list[float]:
    """Scale weights to a sum of 1. Equal shares if all weights are 0."""
    total = sum(weights)
    return [one / total if total > 0 else 1 / len(weights) for one in weights]


def alike(weights: Sequence[float]) -> float:
    """Return the number of equal weights with the same variance (the effective sample size)."""
    return 1 / sum(share * share for share in shares_of(weights))


def distance(own_N: F32, mean_N: F32) -> float:
    """|own - mean| / |mean|, 1 at most."""
    norm = float(np.linalg.norm(mean_N))
    apart = float(np.linalg.norm(own_N - mean_N))
    return min(apart / norm, 1.0) if norm > 0 else float(apart > 0)
