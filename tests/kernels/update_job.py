"""A job of several ranks that exchange updates, in one process, and what must hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pipeline_job import Job, Tensors, normal

from atoll.kernels.pipeline import Outgoing

PLAIN = [(1.0, 0.0, 0.0, 0.0, 0.0)]


class UpdateJob(Job):
    """Ranks that walk at random instead of training, and in float64 what should come of it."""

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
        super().__init__(islands, sizes, live=None, exchange="updates", error_feedback=False, **how)
        self.ranks = range(len(self.pipelines))
        self.step = [0 for _ in self.ranks]
        self.fetched = [[0 for _ in sizes] for _ in self.ranks]  # steps, by rank and tensor
        self.start = [master.double().clone() for master in self.masters(0)]
        self.did = [[torch.zeros(n, dtype=torch.float64) for n in sizes] for _ in self.ranks]
        self.parts: dict[tuple[int, int, int], torch.Tensor] = {}  # by rank, step, tensor; dense
        self.wire: list[tuple[int, Outgoing, int]] = []

    def buffers(self, tensors: Tensors) -> dict[str, Any]:
        tensors.live = tensors.master.to(self._live_type, copy=True)
        return {"master": tensors.master, "residual": None, "live": None if self.by_hand else tensors.live}

    def walk(self, rank: int, keep: int, *, scale: float = 0.1, wait: bool = True) -> None:
        """One update of a rank, and what follows from it there."""
        pipeline, step = self.pipelines[rank], self.step[rank]
        if wait:
            pipeline.await_compressed(5)
        for tensor, mine in enumerate(self.of[rank]):
            before = mine.live.double().clone()
            mine.live += scale * normal(len(before), 9, rank, tensor, step).to(mine.live.dtype)
            self.did[rank][tensor] += mine.live.double() - before
            pipeline.compress_live(step, tensor, mine.live.clone() if self.by_hand else None, keep)
        pipeline.apply(step, step + 1, PLAIN)
        self.step[rank] += 1
        if wait:
            self.settle(rank)

    def settle(self, rank: int) -> None:
        """Let a rank compute what it can, note its parts, and put its messages on the wire."""
        pipeline = self.pipelines[rank]
        pipeline.idle(5)
        for part in pipeline.recent_parts():
            dense = torch.zeros(-(-self.sizes[part.tensor] // 16), 16, dtype=torch.float64)
            dense[part.index.astype(np.int64)] = torch.from_numpy(part.values).double()
            self.parts[rank, part.step, part.tensor] = dense.view(-1)[: self.sizes[part.tensor]]
        for message in pipeline.take_outgoing(10_000):
            self.wire += [(rank, message, receiver) for receiver in self.receivers(rank, message)]

    def carry_one(self, number: int) -> None:
        sender, message, receiver = self.wire.pop(number % len(self.wire))
        why = self.deliver(sender, message, receiver)
        if why == "step too far ahead":
            self.wire.append((sender, message, receiver))
        else:
            assert why is None
            self.settle(receiver)

    def drain(self) -> None:
        for rank in self.ranks:
            self.settle(rank)
        while self.wire:
            self.carry_one(0)

    def catch_up(self, rank: int, step: int = -1) -> None:
        """Fetch whatever is there."""
        self.pipelines[rank].idle(5)
        if not self.by_hand:
            self.pipelines[rank].fetch(range(len(self.sizes)), step, 5)
        else:
            for tensor, mine in enumerate(self.of[rank]):
                _, _, index, values = self.pipelines[rank].changes(tensor, step, 5)
                add(mine.live, index, values)
        self.fetched[rank] = [version + 1 for version in self.pipelines[rank].versions()]

    def owed(self, rank: int, tensor: int) -> torch.Tensor:
        out = torch.full((self.sizes[tensor],), torch.nan)
        live = self.of[rank][tensor].live.clone() if self.by_hand else None
        assert self.pipelines[rank].owed(tensor, live, out) == 0
        return out.double()

    def sent(self, ranks: Sequence[int], tensor: int, steps: int) -> torch.Tensor:
        parts = [self.parts[rank, step, tensor] for rank in ranks for step in range(steps)]
        return torch.stack(parts).sum(0) if parts else torch.zeros(self.sizes[tensor], dtype=torch.float64)

    def check(self, rank: int) -> None:
        """What a rank owes is what it did less what it sent; its live weights have all that is due."""
        n = len(self.ranks)
        for tensor, mine in enumerate(self.of[rank]):
            did = self.did[rank][tensor]
            close(self.owed(rank, tensor), -did / n - self.sent([rank], tensor, self.step[rank]))
            steps = self.fetched[rank][tensor]
            due = n * self.sent([rank], tensor, steps) - self.sent(self.ranks, tensor, steps)
            close(mine.live.double(), self.start[tensor] + did + due)

    def check_end(self) -> None:
        """With nothing on the way."""
        n = len(self.ranks)
        self.assert_equal_masters()
        for tensor, start in enumerate(self.start):
            owed = [self.owed(rank, tensor) for rank in self.ranks]
            did = torch.stack([self.did[rank][tensor] for rank in self.ranks]).sum(0)
            master = self.masters(0)[tensor].double()
            close(start - master + torch.stack(owed).sum(0), -did / n)
            for rank in self.ranks:
                close(self.of[rank][tensor].live.double(), master - n * owed[rank])


def add(live: torch.Tensor, index: Any, values: Any) -> None:
    padded = torch.nn.functional.pad(live, (0, -len(live) % 16)).view(-1, 16)
    blocks = torch.from_numpy(index.astype(np.int64))
    padded[blocks] = (padded[blocks].float() + torch.from_numpy(values)).to(live.dtype)
    live.copy_(padded.view(-1)[: len(live)])


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
