"""Atoll's exchange of updates: every island moves at once by its own optimizer, and what it is ahead of the shared
shared parameters by leaves in parts, the heaviest blocks first. What was not sent stays in the live weights.

With K islands: ahead_i = live_i - shared_param. A part q_i of it is sent; shared_param += u; live_i += u - q_i.

`Updates`: everybody's part goes to everybody, and u = mean_j q_j. `OwnedUpdates`: each island owns a share of the
entries. Parts go to their aggregators alone; an aggregator adds them to a sum of its own, and sends everybody what the
shared parameters are behind that by, in parts again: u is a part of sum - shared_param. What it leaves out waits in the
sum."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

import torch

from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput
from atoll.strategies.shared_params.local_fit_gap import EVERY, NewestAdvantages
from atoll.strategies.shared_params.second_moments import late_of, span_of, told_after
from racing.clock import Exchange
from racing.codecs import Blocks, payload_bytes
from racing.inner import Replica, gather, mean_of, present, ring, shares

MOST_ADVANTAGE: Final = float(ExchangeDensityInput.model_fields["most_advantage"].default)


class Updates:
    """density: share of the blocks that is sent in an exchange. every: steps between two. late: steps that others'
    parts may take. whole_batch: Adam's second moments are those of the whole batch's gradient. at_shared_params:
    gradients are taken at the shared parameters; follows: as the controller does it, once islands' own weights are good
    for their own data alone."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        density: float,
        bits: int,
        every: int = 1,
        late: int = 1,
        whole_batch: bool = True,
        at_shared_params: bool = False,
        follows: bool = False,
    ) -> None:
        self._whole_batch, self._at_shared_params, self._follows = whole_batch, at_shared_params, follows
        self._advantages = [NewestAdvantages() for _ in replicas]
        self._told_B, self._told_due = torch.empty(0), 0
        self._replicas, self._density, self._bits, self._every, self._late = replicas, density, bits, every, late
        self._shared_param = replicas[0].task.initial.clone()
        self._places = replicas[0].task.blocks()
        self._blocks: dict[float, Blocks] = {}  # by density
        self._in_flight: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._sent = [
            torch.zeros_like(self._shared_param) for _ in replicas
        ]  # on its way, and still in the live weights

    @torch.no_grad()
    def step(self, step: int) -> Sequence[Exchange]:
        if step in self._in_flight:
            self._apply(*self._in_flight.pop(step))
        for replica, advantages in zip(self._replicas, self._advantages, strict=True):
            if not replica.away:
                self._train(replica, advantages, step)
        if self._follows and not self._at_shared_params:
            self._at_shared_params = self._own_weights_are_good_for_own_data_alone()
        exchanges = self._share_second_moments(step + 1)
        if (step + 1) % self._every:
            return exchanges
        parts, payload = [], 0.0
        for replica, sent_N in zip(self._replicas, self._sent, strict=True):
            part_N, payload = self._part(replica.theta - self._shared_param - sent_N, self._density, self._bits)
            if replica.away:
                part_N = torch.zeros_like(part_N)
            sent_N.add_(part_N)
            parts.append(part_N)
        due = step + 1 + self._late
        there = [part_N for replica, part_N in zip(self._replicas, parts, strict=True) if not replica.away]
        update_N, exchange = self._exchanged(mean_of(there, self._replicas), payload, step, due)
        self._in_flight[due] = (update_N, parts)
        return (exchange, *exchanges)

    def _train(self, replica: Replica, advantages: NewestAdvantages, step: int) -> None:
        with torch.enable_grad():
            gradient_N = replica.gradient(step, self._shared_param if self._at_shared_params else replica.theta)
        if self._follows and not self._at_shared_params and (step + 1) % EVERY == 0:
            advantages.add(-float(gradient_N @ (replica.theta - self._shared_param)), replica.task.loss)
        replica.update(gradient_N, step)

    def _own_weights_are_good_for_own_data_alone(self) -> bool:
        return statistics.median(one.value for one in self._advantages) > MOST_ADVANTAGE

    def _share_second_moments(self, updates: int) -> Sequence[Exchange]:
        """As the strategies do."""
        moments = [
            (replica.second_moments, share)
            for replica, share in zip(present(self._replicas), shares(self._replicas), strict=True)
        ]
        if updates == self._told_due:
            for one, share in moments:
                one.take(self._told_B, share)
        if not self._whole_batch or not told_after(updates):
            return ()
        self._told_B = torch.stack([one.told(share, updates) for one, share in moments]).sum(0)
        asked, span = (len(self._replicas) - 1) * max(0, self._late - 1), span_of(updates)
        self._told_due = updates + span + late_of(updates, asked)
        return [
            ring(piece.nbytes, len(moments), after=updates - 1 + number * (1 + asked), due=self._told_due)
            for number, piece in enumerate(torch.chunk(self._told_B, -(-span // (1 + asked))))
        ]

    def _part(self, ahead_N: torch.Tensor, density: float, bits: int) -> tuple[torch.Tensor, float]:
        """The heaviest blocks of each tensor as the receiver sees them [N], and their bytes."""
        if density not in self._blocks:
            sizes = [at.stop - at.start for at in self._places]
            self._blocks[density] = Blocks(sizes, density, self._shared_param.device)
        blocks = self._blocks[density]
        return blocks.part(ahead_N, bits), payload_bytes(blocks.entries, bits, indexed=density < 1)

    def _exchanged(self, mean_N: torch.Tensor, payload: float, after: int, due: int) -> tuple[torch.Tensor, Exchange]:
        """Return the change of the shared parameters, and what was sent for it. payload: bytes of one island's part."""
        islands = len(self._replicas)
        sparse = gather(payload, islands, after=after, due=due)
        if self._density < 1:
            return mean_N, sparse
        dense = ring(
            payload_bytes(self._shared_param.numel(), self._bits, indexed=False), islands, after=after, due=due
        )
        return mean_N, min(dense, sparse, key=lambda one: one.up_bytes)

    def _apply(self, update_N: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self._shared_param += update_N
        for replica, sent_N, part_N in zip(self._replicas, self._sent, parts, strict=True):
            replica.theta.add_(update_N - part_N)
            sent_N.sub_(part_N)

    def consolidated(self) -> torch.Tensor:
        return self._shared_param


class OwnedUpdates(Updates):
    """back: share of the blocks that aggregators send back, in as many bits."""

    def __init__(self, replicas: Sequence[Replica], *, back: float, **exchange: Any) -> None:
        super().__init__(replicas, **exchange)
        self._back = back
        self._sum = self._shared_param.clone()  # of all aggregators, side by side

    def _exchanged(self, mean_N: torch.Tensor, payload: float, after: int, due: int) -> tuple[torch.Tensor, Exchange]:
        self._sum += mean_N
        behind_N = self._sum - self._shared_param
        for update_N, _ in self._in_flight.values():
            behind_N -= update_N
        update_N, returned = self._part(behind_N, self._back, self._bits)
        islands = len(self._replicas)
        # Parts go to the other aggregators; the total of its own share goes to the others.
        moved = (islands - 1) / islands * (payload + returned)
        return update_N, Exchange(after, due, moved, moved, hops=2)
