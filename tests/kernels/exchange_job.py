"""All ranks of a job in one process: their engines, and a network that a test moves by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from atoll.kernels.compress import block_count
from atoll.kernels.exchange_engine import ExchangeEngine, GradientEngine, Outgoing, Rule

RATES: dict[Rule, tuple[float, float, float, float, float]] = {
    "sgd": (0.1, 0.01, 0.9, 0.0, 0.0),
    "nesterov": (0.1, 0.01, 0.9, 0.0, 0.0),
    "adam": (0.05, 0.01, 0.9, 0.99, 1e-8),
    "adamw": (0.05, 0.1, 0.9, 0.99, 1e-8),
}
LAYOUTS = [[[0]], [[0], [1]], [[0, 1]], [[0, 1], [2]], [[0, 1], [2, 3]]]
ALL = 10**9
"""More blocks than any tensor has."""


def normal(entries: int, *seed: int) -> torch.Tensor:
    number = 1
    for part in seed:
        number = number * 1009 + part
    return torch.randn(entries, generator=torch.Generator().manual_seed(number))


class Tensors:
    """One rank's memory of one tensor."""

    def __init__(self, entries: int, number: int, rule: Rule, live: torch.dtype | None, *, lazy: bool) -> None:
        self.shared_param = normal(entries, 77, number)
        self.residual, self.first, self.second = (torch.zeros(entries) for _ in range(3))
        self.last_step = torch.zeros(block_count(entries), dtype=torch.int32) if lazy else None
        self.live: Any = None if live is None else self.shared_param.to(live, copy=True)


class Job:
    makes: Any = GradientEngine

    def __init__(
        self,
        islands: Sequence[Sequence[int]],
        sizes: Sequence[int],
        *,
        rule: Rule = "sgd",
        live: torch.dtype | None = torch.float32,
        lazy: bool = False,
        **settings: Any,
    ) -> None:
        self.islands, self.sizes, self.rule = islands, sizes, rule
        ranks = range(sum(len(island) for island in islands))
        self.of = [[Tensors(n, t, rule, live, lazy=lazy) for t, n in enumerate(sizes)] for _ in ranks]
        self.engines = [self.makes(rank=rank, islands=islands, **settings) for rank in ranks]
        for engine, mine in zip(self.engines, self.of, strict=True):
            for order, tensors in enumerate(mine):
                buffers = self.buffers(tensors) | self.route(engine, order)
                assert engine.add_tensor(order=order, **buffers) == order

    def buffers(self, tensors: Tensors) -> dict[str, Any]:
        return vars(tensors) | {"rule": self.rule}

    def route(self, engine: ExchangeEngine, tensor: int) -> dict[str, Any]:
        """When a tensor is exchanged, and who owns it."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self.engines:
            engine.close()

    def island_of(self, rank: int) -> int:
        return next(k for k, island in enumerate(self.islands) if rank in island)

    def receivers(self, sender: int, message: Outgoing) -> list[int]:
        mine = self.island_of(sender)
        if message.to >= 0:
            return [message.to]
        if message.kind == 0:
            return [rank for rank in self.islands[mine] if rank != sender]
        if message.kind == 8:
            return [rank for island in self.islands for rank in island if rank != sender]
        return [rank for k, island in enumerate(self.islands) if k != mine for rank in island]

    def deliver(self, sender: int, message: Outgoing, receiver: int) -> str | None:
        origin = sender if message.kind == 0 else self.island_of(sender)
        return self.engines[receiver].deliver(
            message.kind, origin, message.sync_round, message.tensor, message.count, message.payload
        )

    def exchange(self) -> list[tuple[int, Outgoing]]:
        """Move messages until none is left and all is computed; returns all of them with their senders."""
        sent: list[tuple[int, Outgoing]] = []
        while True:
            for engine in self.engines:
                engine.idle(10)
            fresh = [(rank, message) for rank, p in enumerate(self.engines) for message in p.take_outgoing(1000)]
            if not fresh:
                return sent
            for sender, message in fresh:
                for receiver in self.receivers(sender, message):
                    assert self.deliver(sender, message, receiver) is None
            sent += fresh

    def compress(self, sync_round: int, k_blocks: int, *, scale: float = 1.0) -> list[list[torch.Tensor]]:
        """Every rank compresses a random gradient of every tensor; returns them by rank and tensor."""
        gradients = [
            [scale * normal(n, 5, rank, t, sync_round) for t, n in enumerate(self.sizes)]
            for rank in range(len(self.engines))
        ]
        for engine, mine in zip(self.engines, gradients, strict=True):
            for tensor in reversed(range(len(self.sizes))):
                engine.compress(sync_round, tensor, mine[tensor], 1 / len(self.engines), k_blocks)
        return gradients

    def apply(self, sync_round: int, update: int | None = None, **how: Any) -> None:
        for engine in self.engines:
            engine.apply(sync_round, sync_round + 1 if update is None else update, [RATES[self.rule]], **how)

    def fetch(self, sync_round: int) -> None:
        for engine in self.engines:
            engine.fetch(range(len(self.sizes)), sync_round, 5)

    def shared_params(self, rank: int) -> list[torch.Tensor]:
        return [tensors.shared_param for tensors in self.of[rank]]

    def assert_equal_shared_params(self) -> None:
        for rank in range(1, len(self.engines)):
            for mine, theirs in zip(self.shared_params(0), self.shared_params(rank), strict=True):
                assert same_bits(mine, theirs), f"rank {rank} has another shared parameter than rank 0"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.view(torch.int32) == b.view(torch.int32)).all())
