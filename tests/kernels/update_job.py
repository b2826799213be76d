"""A job of several ranks that exchange updates, in one process, and what must hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from exchange_job import Job, Tensors, normal

from atoll.kernels.exchange_engine import Outgoing, UpdateEngine


class UpdateJob(Job):
    """Ranks that walk at random instead of training, and in float64 what should come of it."""

    makes = UpdateEngine

    def __init__(
        self,
        islands: Sequence[Sequence[int]],
        sizes: Sequence[int],
        *,
        live: torch.dtype = torch.float32,
        by_hand: bool = False,
        **how: Any,
    ) -> None:
        """by_hand: the live weights are kept by the test, which takes `changes`."""
        self._live_type, self.by_hand = live, by_hand
        super().__init__(islands, sizes, live=None, **how)
        self.ranks = range(len(self.engines))
        self.weigh([1.0 for _ in self.ranks])
        self.sync_round = [0 for _ in self.ranks]
        self.fetched = [[0 for _ in sizes] for _ in self.ranks]  # rounds, by rank and tensor
        for engine, mine in zip(self.engines, self.of, strict=True):
            for tensor, one in enumerate(mine):
                engine.set_live(tensor, None, 1.0, one.live if by_hand else None)
        self.start = [shared_param.double().clone() for shared_param in self.shared_params(0)]
        self.did = [[torch.zeros(n, dtype=torch.float64) for n in sizes] for _ in self.ranks]
        self.parts: dict[tuple[int, int, int], torch.Tensor] = {}  # by rank, round, tensor; dense
        self.totals: dict[tuple[int, int], torch.Tensor] = {}  # by round and tensor; dense
        self.wire: list[tuple[int, Outgoing, int]] = []

    def weigh(self, shares: Sequence[float]) -> None:
        """From now on the ranks' updates count in these proportions."""
        self.weights = [share / sum(shares) for share in shares]

    def buffers(self, tensors: Tensors) -> dict[str, Any]:
        tensors.live = tensors.shared_param.to(self._live_type, copy=True)
        return {"shared_param": tensors.shared_param, "live": None if self.by_hand else tensors.live}

    def walk(self, rank: int, k_blocks: int, *, scale: float = 0.1, by_a_step: bool = False, wait: bool = True) -> None:
        """One update of a rank, and what follows from it there. by_a_step: of its weights of 16 bits one in twenty
        moves by their least step, away from 0."""
        engine, sync_round = self.engines[rank], self.sync_round[rank]
        if wait:
            engine.await_compressed(5)
        for tensor, mine in enumerate(self.of[rank]):
            before = mine.live.double().clone()
            chance = normal(len(before), 9, rank, tensor, sync_round)
            if by_a_step:
                mine.live.view(torch.int16).add_((chance > 1.645).to(torch.int16))
            else:
                mine.live += scale * chance.to(mine.live.dtype)
            self.did[rank][tensor] += mine.live.double() - before
            if self.by_hand and self.is_due(tensor, sync_round):
                self.choose(rank, tensor, k_blocks)
        engine.sum_updates(sync_round, self.weights[rank], [k_blocks] * len(self.sizes))
        self.sync_round[rank] += 1
        if wait:
            self.compute(rank)

    def choose(self, rank: int, tensor: int, k_blocks: int) -> None:
        """By hand, what a rank sends of a tensor."""
        live = self.of[rank][tensor].live.clone()
        self.engines[rank].compress_live(self.sync_round[rank], tensor, live, self.weights[rank], k_blocks)

    def is_due(self, tensor: int, sync_round: int) -> bool:
        return True

    def compute(self, rank: int) -> None:
        """Let a rank compute what it can, note its parts, and put its messages on the wire."""
        engine = self.engines[rank]
        engine.idle(5)
        for part in engine.recent_parts():
            dense = torch.zeros(-(-self.sizes[part.tensor] // 16), 16, dtype=torch.float64)
            dense[part.index.astype(np.int64)] = torch.from_numpy(part.values).double()
            if part.kind == 8:
                self.totals[part.sync_round, part.tensor] = dense.view(-1)[: self.sizes[part.tensor]]
                continue
            self.parts[rank, part.sync_round, part.tensor] = dense.view(-1)[: self.sizes[part.tensor]]
        for message in engine.take_outgoing(10_000):
            self.wire += [(rank, message, receiver) for receiver in self.receivers(rank, message)]

    def move_one(self, number: int) -> None:
        sender, message, receiver = self.wire.pop(number % len(self.wire))
        why = self.deliver(sender, message, receiver)
        if why == "round too far ahead":
            self.wire.append((sender, message, receiver))
        else:
            assert why is None, why
            self.compute(receiver)

    def drain(self) -> None:
        for rank in self.ranks:
            self.compute(rank)
        while self.wire:
            self.move_one(0)

    def catch_up(self, rank: int, sync_round: int = -1) -> None:
        """Fetch whatever is there."""
        self.engines[rank].idle(5)
        if not self.by_hand:
            self.engines[rank].fetch(range(len(self.sizes)), sync_round, 5)
        else:
            _, changes = self.engines[rank].changes(range(len(self.sizes)), sync_round, 5)
            for mine, change in zip(self.of[rank], changes, strict=True):
                add(mine.live, change.index, change.values)
        self.fetched[rank] = [version + 1 for version in self.engines[rank].versions()]

    def residual(self, rank: int, tensor: int) -> torch.Tensor:
        out = torch.full((self.sizes[tensor],), torch.nan)
        live = self.of[rank][tensor].live.clone() if self.by_hand else None
        assert self.engines[rank].read_residual(tensor, live, out) == 0
        return out.double()

    def sent(self, ranks: Sequence[int], tensor: int, rounds: int) -> torch.Tensor:
        parts = [self.parts[rank, sync_round, tensor] for rank in ranks for sync_round in range(rounds)]
        return torch.stack(parts).sum(0) if parts else torch.zeros(self.sizes[tensor], dtype=torch.float64)

    def came(self, rank: int, tensor: int, rounds: int) -> torch.Tensor:
        """What live weights of a rank get in these rounds, its own part taken out; while weights do not change."""
        return self.sent([rank], tensor, rounds) / self.weights[rank] - self.sent(self.ranks, tensor, rounds)

    def check(self, rank: int) -> None:
        """A rank's residual is what it did less what it sent; its live weights have all that came."""
        for tensor, mine in enumerate(self.of[rank]):
            did = self.did[rank][tensor]
            sent = self.sent([rank], tensor, self.sync_round[rank])
            close(self.residual(rank, tensor), -self.weights[rank] * did - sent)
            others = self.came(rank, tensor, self.fetched[rank][tensor])
            if mine.live.dtype == torch.float32:
                close(mine.live.double(), self.start[tensor] + did + others)

    def check_end(self) -> None:
        """With nothing on the way."""
        self.assert_equal_shared_params()
        for tensor, start in enumerate(self.start):
            residuals = [self.residual(rank, tensor) for rank in self.ranks]
            did = sum(self.weights[rank] * self.did[rank][tensor] for rank in self.ranks)
            shared_param = self.shared_params(0)[tensor].double()
            close(start - shared_param + torch.stack(residuals).sum(0), -did)
            for rank in self.ranks:
                if self._live_type == torch.float32:
                    close(self.of[rank][tensor].live.double(), shared_param - residuals[rank] / self.weights[rank])


def add(live: torch.Tensor, index: Any, values: Any) -> None:
    padded = torch.nn.functional.pad(live, (0, -len(live) % 16)).view(-1, 16)
    blocks = torch.from_numpy(index.astype(np.int64))
    padded[blocks] = (padded[blocks].float() + torch.from_numpy(values)).to(live.dtype)
    live.copy_(padded.view(-1)[: len(live)])


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
