"""Which samples make up which batch: every rank works it out alone and all come to the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from atoll.agent.runtime.schedule import ShareSchedule
from atoll.agent.runtime.split import split_batch
from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class Position:
    """How far the job's data has been trained on. Free of ranks, so that any number of them can go on from it."""

    epoch: int
    consumed: int  # samples of this epoch, from the start of its order
    step: int  # global batches completed since the job began


@dataclass(frozen=True, slots=True)
class Cut:
    """One global batch and this rank's part of it."""

    step: int  # number of the global batch since the job began, from 0
    epoch: int
    start: int  # of the global batch in the epoch's order
    total: int  # samples of all ranks
    local: int  # samples of this rank that count; 0 where it got one sample at weight 0
    weight: float  # local / total


class EpochOrder:
    """The order of an epoch's samples, from (seed, epoch) alone."""

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, epoch: int, begin: int, end: int) -> list[int]:
        """The dataset's indices at positions [begin, end) of the epoch."""
        if not self._shuffle:
            return list(range(begin, end))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
            self._order = torch.randperm(self.samples, generator=generator)
            self._epoch = epoch
        indices: list[int] = self._order[begin:end].tolist()
        return indices


class Cutter:
    """Cuts global batches and this rank's slice out of them."""

    def __init__(
        self, order: EpochOrder, global_batch: int, drop_last: bool, rank: int, schedule: ShareSchedule
    ) -> None:
        self._order = order
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._rank = rank
        self._schedule = schedule
        self._last_split: tuple[int, Sequence[float], list[int]] = (0, (), [])

    def batches_left(self, consumed: int) -> int:
        left = self._order.samples - consumed
        return left // self._global_batch if self._drop_last else -(-left // self._global_batch)

    def cut(self, position: Position) -> tuple[Cut, list[int]] | None:
        """The batch that begins at `position` and this rank's dataset indices; None at the end of the epoch."""
        if self.batches_left(position.consumed) == 0:
            return None
        start = position.consumed
        total = min(self._global_batch, self._order.samples - start)
        counts = self._split(total, self._schedule.shares_at(position.step))
        local = counts[self._rank]
        cut = Cut(position.step, position.epoch, start, total, local, local / total)
        begin = start + sum(counts[: self._rank])
        if local == 0:
            # A rank without samples still takes part in the collectives, which needs a backward pass.
            begin, local = start, 1
        return cut, self._order.indices(position.epoch, begin, begin + local)

    def _split(self, total: int, shares: Sequence[float]) -> list[int]:
        last_total, last_shares, counts = self._last_split
        if total != last_total or shares is not last_shares:
            counts = split_batch(total, shares)
            self._last_split = (total, shares, counts)
        return counts


def after(cut: Cut) -> Position:
    """The position once this batch is completed."""
    return Position(cut.epoch, cut.start + cut.total, cut.step + 1)


def mixed_seed(*parts: int) -> int:
    """One generator seed from several numbers. torch's CPU generator uses the low 32 bits: they must be well mixed."""
    try:
        words = b"".join(part.to_bytes(9, "little", signed=True) for part in parts)
    except OverflowError as error:
        raise BadInput(f"a seed among {parts} is too large; it must be at least -2^64 and below 2^64") from error
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")
