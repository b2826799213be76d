"""Atoll's exchange of updates: every island moves at once by its own optimizer, and what it is ahead of the shared
masters by leaves in parts, the heaviest blocks first. What was not sent stays in the live weights.

With K islands: ahead_i = live_i - master. A part q_i of it is sent; master += mean_j q_j;
live_i += mean_j q_j - q_i."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from racing.clock import Exchange
from racing.codecs import payload_bytes, rounded, top_blocks
from racing.inner import Replica, gather, ring


class Updates:
    """density: share of the blocks that is sent in an exchange. every: steps between two. late: steps that others'
    parts may take."""

    def __init__(
        self, replicas: Sequence[Replica], *, density: float, bits: int, every: int = 1, late: int = 1
    ) -> None:
        self._replicas, self._density, self._bits, self._every, self._late = replicas, density, bits, every, late
        self._master = replicas[0].task.initial.clone()
        self._blocks = replicas[0].task.blocks()
        self._in_flight: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._sent = [torch.zeros_like(self._master) for _ in replicas]  # on its way, and still in the live weights

    @torch.no_grad()
    def step(self, step: int) -> Sequence[Exchange]:
        if step in self._in_flight:
            self._apply(*self._in_flight.pop(step))
        with torch.enable_grad():
            for replica in self._replicas:
                replica.local_step(step)
        if (step + 1) % self._every:
            return ()
        parts, entries = [], 0
        for replica, sent_N in zip(self._replicas, self._sent, strict=True):
            ahead_N = replica.theta - self._master - sent_N
            part_N = torch.zeros_like(ahead_N)
            entries = 0
            for at in self._blocks:
                mask = top_blocks(ahead_N[at], self._density)
                part_N[at][mask] = rounded(ahead_N[at][mask], self._bits)
                entries += int(mask.sum())
            sent_N.add_(part_N)
            parts.append(part_N)
        self._in_flight[step + 1 + self._late] = (torch.stack(parts).mean(0), parts)
        islands, due = len(self._replicas), step + 1 + self._late
        payload = payload_bytes(entries, self._bits, indexed=self._density < 1)
        dense = ring(payload_bytes(self._master.numel(), self._bits, indexed=False), islands, after=step, due=due)
        sparse = gather(payload, islands, after=step, due=due)
        return (min(dense, sparse, key=lambda one: one.up_bytes),) if self._density >= 1 else (sparse,)

    def _apply(self, mean_N: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self._master += mean_N
        for replica, sent_N, part_N in zip(self._replicas, self._sent, parts, strict=True):
            replica.theta.add_(mean_N - part_N)
            sent_N.sub_(part_N)

    def consolidated(self) -> torch.Tensor:
        return self._master
