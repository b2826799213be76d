"""Methods that train many steps between two exchanges: local SGD, DiLoCo and its streaming form, SparseLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from racing import codecs
from racing.clock import Exchange
from racing.codecs import payload_bytes, rounded
from racing.inner import Replica, gather, mean_of, present, ring

CHUNK: Final = 4096


class DiLoCo:
    """Every `every` steps the mean of what the islands moved by goes through an outer Nesterov SGD.

    bits: of the moves on the wire, 4 with a scale a block. fragments: parts of the model that take turns, so that each
    is exchanged every `every` steps, all at other moments. late: steps that a fragment's exchange may take; alpha:
    share of the island's own weights that it keeps when the result comes. Local SGD is outer rate 1 without momentum.
    Source: DiLoCo, 2311.08105, Algorithm 1; Streaming DiLoCo, 2501.18512, sections 2.1 to 2.3."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        every: int,
        outer_learning_rate: float,
        momentum: float,
        bits: int = 32,
        fragments: int = 1,
        late: int = 0,
        alpha: float = 0.0,
    ) -> None:
        self._replicas, self._every = replicas, every
        self._rate, self._momentum, self._bits, self._late, self._alpha = (
            outer_learning_rate,
            momentum,
            bits,
            late,
            alpha,
        )
        task = replicas[0].task
        self._global = task.initial.clone()
        self._velocity = torch.zeros_like(self._global)
        owner = torch.empty(task.entries, dtype=torch.long)
        for number, at in enumerate(task.blocks()):
            owner[at] = number % fragments
        owner = owner.to(self._global.device)
        self._fragments = [(owner == number).nonzero().squeeze(1) for number in range(fragments)]
        self._pending: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.no_grad()
    def step(self, step: int) -> Sequence[Exchange]:
        for index, mean in self._pending.pop(step, ()):
            self._merge(index, mean, self._alpha)
        with torch.enable_grad():
            for replica in self._replicas:
                replica.local_step(step)
        exchanges = []
        for number, index in enumerate(self._fragments):
            offset = number * self._every // len(self._fragments)
            if (step + 1 - offset) % self._every or step + 1 <= offset:
                continue
            moves = [self._global[index] - replica.theta[index] for replica in present(self._replicas)]
            mean = mean_of([rounded(move, self._bits) for move in moves], self._replicas)
            if self._bits != 32:
                mean = rounded(mean, self._bits)  # sums are rounded again on their way back
            payload = payload_bytes(index.numel(), self._bits, indexed=False)
            exchanges.append(ring(payload, len(self._replicas), after=step, due=step + 1 + self._late))
            if self._late:
                self._pending.setdefault(step + 1 + self._late, []).append((index, mean))
            else:
                self._merge(index, mean, 0.0)
        return exchanges

    def _merge(self, index: torch.Tensor, mean: torch.Tensor, alpha: float) -> None:
        velocity = self._momentum * self._velocity[index] + mean
        self._velocity[index] = velocity
        self._global[index] -= self._rate * (mean + self._momentum * velocity)
        for replica in self._replicas:
            replica.theta[index] = alpha * replica.theta[index] + (1 - alpha) * self._global[index]

    def consolidated(self) -> torch.Tensor:
        return self._global


class SparseLoCo:
    """DiLoCo with the largest entries of each chunk of 4,096, in 2 bits, with error feedback and no momentum.

    Source: SparseLoCo, 2508.15706, Algorithm 1."""

    def __init__(
        self, replicas: Sequence[Replica], *, every: int, density: float, outer_learning_rate: float, beta: float = 0.95
    ) -> None:
        self._replicas, self._every, self._density = replicas, every, density
        self._rate, self._beta = outer_learning_rate, beta
        self._global = replicas[0].task.initial.clone()
        self._errors = [torch.zeros_like(self._global) for _ in replicas]

    @torch.no_grad()
    def step(self, step: int) -> Sequence[Exchange]:
        with torch.enable_grad():
            for replica in self._replicas:
                replica.local_step(step)
        if (step + 1) % self._every:
            return ()
        kept = max(1, round(self._density * CHUNK))
        parts = []
        for replica, error_N in zip(self._replicas, self._errors, strict=True):
            if replica.away:
                continue
            error_N.mul_(self._beta).add_(self._global - replica.theta)
            sent = largest_of_chunks(error_N, kept)
            error_N.sub_(sent)
            parts.append(sent)
        self._global -= self._rate * mean_of(parts, self._replicas)
        for replica in self._replicas:
            replica.theta.copy_(self._global)
        chunks = -(-self._global.numel() // CHUNK)
        payload = chunks * (kept * (2 + 12) / 8 + 8)  # 2 bits a value, 12 an index, four levels a chunk
        return (gather(payload, len(self._replicas), after=step, due=step + 1),)

    def consolidated(self) -> torch.Tensor:
        return self._global


def largest_of_chunks(values_N: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the `kept` largest entries of each CHUNK as the receiver reads them in 2 bits [N]; zeros elsewhere."""
    chunks = -(-values_N.numel() // CHUNK)
    padded = values_N.new_zeros(chunks * CHUNK)
    padded[: values_N.numel()] = values_N
    rows = padded.view(chunks, CHUNK)
    index = rows.abs().topk(kept, dim=1).indices
    length = -(-kept // codecs.CHUNK) * codecs.CHUNK  # no chunk shares magnitudes with the next
    chosen = functional.pad(rows.gather(1, index), (0, length - kept))
    seen = rounded(chosen.reshape(-1), 2).view(chunks, length)[:, :kept]
    return torch.zeros_like(rows).scatter_(1, index, seen).view(-1)[: values_N.numel()]
