"""Chooses the samples of each batch: every rank works it out alone and all come to the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.agent.runtime.data.orders import Order
from atoll.agent.runtime.data.split import split_batch
from atoll.agent.runtime.plans.schedule import PlanSchedule


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of training through the job's data, independent of ranks: any number of them can continue from it."""

    epoch: int
    consumed: int  # samples of this epoch, from the start of its order
    step: int  # global batches completed since the job began
    samples: int = field(default=0, compare=False)  # of this epoch; 0: not known, as of a stream


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """One global batch and this rank's part of it."""

    step: int  # number of the global batch since the job began, from 0
    epoch: int
    start: int  # of the global batch in the epoch's order
    total: int  # samples of all ranks
    local: int  # samples of this rank that count; 0 where it got others' at weight 0
    weight: float  # local / total: what this rank's mean gradient counts in that of the global batch
    share: float  # of a whole batch, as the plan splits it; over all ranks 1, and above 0 on each
    shares: tuple[float, ...] = ()  # all ranks'
    samples: int = field(default=0, compare=False)  # of this epoch; 0: not known, as of a stream
    passes: int = 1  # in which this rank trains its part
    number: int = 0  # of them, which this is; 0: the part is of all


class BatchSlicer:
    """Cuts global batches, as large as the plan says, and this rank's slice out of them."""

    def __init__(
        self,
        order: Order,
        global_batch: int,
        drop_last: bool,
        rank: int,
        schedule: PlanSchedule,
        *,
        min_local_batch: int = 1,
        batch_of: int = 0,
        divides: bool = True,
    ) -> None:
        """global_batch: the script's own, which holds where the plan says nothing. min_local_batch: the fewest samples
        of a slice that is not empty. batch_of: so many workers' is the script's; 0: that of all. divides: whether a
        part may have several passes."""
        self._order = order
        self._global_batch, self._batch_of = global_batch, batch_of
        self._drop_last = drop_last
        self.rank = rank
        self._schedule = schedule
        self._min_local_batch, self._divides = min_local_batch, divides
        self._last_split: tuple[int, Sequence[float], list[int]] = (0, (), [])

    @property
    def own_batch(self) -> int:
        """Samples of all ranks, as the script gave it."""
        return self._global_batch * (self._schedule.world_size // self._batch_of if self._batch_of else 1)

    def batch_at(self, step: int) -> int:
        """Samples of all ranks in `step`, unless it is an epoch's last."""
        return self._schedule.planned_at(step).total_batch or self.own_batch

    def own_batches(self) -> int:
        """Return the batches of an epoch that begins now with the script's batch size. Raises TypeError for a
        stream."""
        samples = self._order.read_length()
        if samples is None:
            raise TypeError("a stream has no length: where its epoch ends shows when it does")
        return self._batches(samples, self.own_batch)

    def share_at(self, step: int) -> float:
        """This rank's share of a whole batch in `step`: its samples there, or one where it would have none."""
        return self._shares_at(step)[self.rank]

    def batches_left(self, position: Position) -> int:
        """Return the batches left in the epoch under the current plan; for a stream, whether there is one."""
        batch = self.batch_at(position.step)
        left = self._order.left(position.epoch, position.consumed, batch if self._drop_last else 1)
        return self._batches(left, batch)

    def slice_at(self, position: Position) -> tuple[BatchSlice, list[Any]] | None:
        """The batch that begins at `position` and what this rank asks the dataset for; None at the end of the epoch."""
        if self.batches_left(position) == 0:
            return None
        return self._slice(position, self._order.cut(position.epoch, position.consumed, self.batch_at(position.step)))

    def in_passes(self, made: tuple[BatchSlice, list[Any]]) -> list[tuple[BatchSlice, list[Any]]]:
        """Divide this rank's part of a batch into the passes of the plan, as equal as can be.

        A pass without a sample that counts has others at weight 0, as a rank without any."""
        whole, indices = made
        if whole.passes == 1:
            return [made]
        counts = split_batch(whole.local, (1.0,) * whole.passes, self._min_local_batch)
        passes, begin = [], 0
        for number, local in enumerate(counts, start=1):
            own = indices[begin : begin + local] if local else indices[: self._min_local_batch]
            passes.append((replace(whole, local=local, weight=local / whole.total, number=number), own))
            begin += local
        return passes

    def whole(self, one: BatchSlice) -> BatchSlice:
        """Return this rank's part of a batch, of which `one` is a pass or all."""
        if not one.number:
            return one
        local = self._split(one.total, self._schedule.planned_at(one.step).shares)[self.rank]
        return replace(one, local=local, weight=local / one.total, number=0)

    def slice_ending(self, end: Position) -> tuple[BatchSlice, list[Any]]:
        """The batch that ended the epoch at `end`; another that ends there where batches had other sizes than now."""
        batch = self.batch_at(end.step - 1)
        total = min(batch, end.consumed) if self._drop_last else (end.consumed - 1) % batch + 1
        return self._slice(Position(end.epoch, end.consumed - total, end.step - 1), total)

    def _batches(self, samples: int, batch: int) -> int:
        return samples // batch if self._drop_last else -(-samples // batch)

    def _slice(self, position: Position, total: int) -> tuple[BatchSlice, list[Any]]:
        start, shares = position.consumed, self._shares_at(position.step)
        counts = self._split(total, self._schedule.planned_at(position.step).shares)
        local = counts[self.rank]
        weight, share = local / total, shares[self.rank]
        batch_slice = BatchSlice(
            position.step,
            position.epoch,
            start,
            total,
            local,
            weight,
            share,
            shares,
            self._order.samples or 0,
            self._schedule.planned_at(position.step).passes if self._divides else 1,
        )
        begin = start + sum(counts[: self.rank])
        if local == 0:
            # A rank without samples still takes part in the collectives, which needs a backward pass.
            begin, local = start, min(self._min_local_batch, total)
        return batch_slice, self._order.indices(position.epoch, begin, begin + local)

    def _shares_at(self, step: int) -> tuple[float, ...]:
        counts = self._split(self.batch_at(step), self._schedule.planned_at(step).shares)
        at_least_one = [max(count, 1) for count in counts]
        return tuple(count / sum(at_least_one) for count in at_least_one)

    def _split(self, total: int, shares: Sequence[float]) -> list[int]:
        last_total, last_shares, counts = self._last_split
        if total != last_total or shares is not last_shares:
            counts = split_batch(total, shares, self._min_local_batch)
            self._last_split = (total, shares, counts)
        return counts


def after(batch_slice: BatchSlice) -> Position:
    """The position once this batch is completed."""
    end = batch_slice.start + batch_slice.total
    return Position(batch_slice.epoch, end, batch_slice.step + 1, batch_slice.samples)
