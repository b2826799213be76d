"""The task island-lm: a byte-level GPT on four domains, spread over islands.

Held-out loss is the mean over the four domains, in nats a byte, on the same windows for every method."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from byte_gpt import ByteGPT

from racing.domains import DOMAINS, Text, domain

PARTITIONS: Final = ("P0", "P1", "P2", "P3")
DIRICHLET: Final = 0.3


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    layers: int
    context: int
    batch: int  # sequences of an island in a step


SIZES: Final = {
    "XXS": Size(width=64, layers=2, context=64, batch=8),
    "XS": Size(width=64, layers=4, context=64, batch=16),
    "S": Size(width=128, layers=4, context=128, batch=16),
    "M": Size(width=256, layers=4, context=128, batch=16),
    "L": Size(width=512, layers=4, context=128, batch=16),
}


class UntiedGPT(ByteGPT):
    """ByteGPT with an output layer of its own, initialised as GPT-2 is."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__(width=width, layers=layers, heads=max(1, width // 32), context=context)
        self.head = nn.Linear(width, 256, bias=False)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(positions)))
        logits: torch.Tensor = self.head(x)
        return logits


@dataclass(frozen=True, slots=True)
class Shard:
    """What one island trains on. `speed` is relative to the fastest."""

    streams: tuple[Text, ...]
    weights: tuple[float, ...]  # of the streams, sum 1
    speed: float = 1.0


def shards(partition: str, islands: int, seed: int) -> list[Shard]:
    """The islands' data. P0: disjoint parts of every domain. P1: one domain an island. P2: domains mixed by
    Dirichlet(0.3). P3: as P0 with sizes 8:4:2:1 and speeds 4:2:1:1."""
    texts = [domain(name)[0] for name in DOMAINS]
    even = tuple(1 / len(texts) for _ in texts)
    match partition:
        case "P1":
            return [Shard((texts[i % len(texts)],), (1.0,)) for i in range(islands)]
        case "P2":
            mixes = np.random.default_rng(seed).dirichlet([DIRICHLET] * len(texts), islands)
            parts = [np.array_split(text, islands) for text in texts]
            return [
                Shard(tuple(part[i] for part in parts), tuple(float(weight) for weight in mix))
                for i, mix in enumerate(mixes)
            ]
        case "P0" | "P3":
            sizes = [1.0] * islands if partition == "P0" else [2.0 ** (islands - 1 - i) for i in range(islands)]
            speeds = [1.0] * islands if partition == "P0" else [max(0.25, 0.5**i) for i in range(islands)]
            cuts = np.cumsum(sizes)[:-1] / sum(sizes)
            parts = [np.split(text, [int(cut * len(text)) for cut in cuts]) for text in texts]
            return [Shard(tuple(part[i] for part in parts), even, speeds[i]) for i in range(islands)]
        case _:
            raise SystemExit(f"race: no partition {partition!r}; there are {', '.join(PARTITIONS)}")


def everything() -> Shard:
    """All data on one island."""
    texts = tuple(domain(name)[0] for name in DOMAINS)
    return Shard(texts, tuple(1 / len(texts) for _ in texts))


class Batches:
    """Random windows of a shard: the same (seed, island, step) gives the same batch to every method."""

    def __init__(self, shard: Shard, size: Size, seed: int, island: int) -> None:
        self._shard, self._size, self._seed, self._island = shard, size, seed, island

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [batch, context] twice: bytes, and the byte that follows each."""
        random = np.random.default_rng((self._seed, self._island, step))
        rows = self._size.batch
        chosen = random.choice(len(self._shard.streams), rows, p=self._shard.weights)
        windows = np.empty((rows, self._size.context + 1), np.int64)
        for row, stream in enumerate(chosen):
            text = self._shard.streams[stream]
            start = int(random.integers(len(text) - self._size.context - 1))
            windows[row] = text[start : start + self._size.context + 1]
        both = torch.from_numpy(windows)
        return both[:, :-1], both[:, 1:]


class Task:
    """One model that every island instantiates, with its held-out windows. Parameters are one flat vector theta [N]."""

    def __init__(self, size: Size, seed: int, windows: int = 32) -> None:
        """windows: held-out ones of each domain."""
        self.size = size
        torch.manual_seed(seed)
        self.model = UntiedGPT(size.width, size.layers, size.context)
        self._parameters = list(self.model.parameters())
        self.shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self.initial = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        self.entries = self.initial.numel()
        self._held_out = [_spaced(domain(name)[1], windows, size.context) for name in DOMAINS]
        self._gradient = torch.zeros_like(self.initial)
        at = 0
        for parameter in self._parameters:
            parameter.grad = self._gradient[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def gradient(self, theta: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of the mean loss at theta [N]. Returns float32 [N], overwritten by the next call."""
        self._load(theta)
        self._gradient.zero_()
        functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        return self._gradient

    @torch.no_grad()
    def held_out(self, theta: torch.Tensor) -> float:
        """Mean over the domains, nats a byte."""
        self._load(theta)
        losses = [
            functional.cross_entropy(self.model(both[:, :-1]).flatten(0, 1), both[:, 1:].flatten()).item()
            for both in self._held_out
        ]
        return sum(losses) / len(losses)

    def _load(self, theta: torch.Tensor) -> None:
        at = 0
        for parameter in self._parameters:
            parameter.data = theta[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def blocks(self) -> Sequence[slice]:
        """The tensors' places in theta."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [slice(int(end) - int(np.prod(shape)), int(end)) for end, shape in zip(ends, self.shapes, strict=True)]


def _spaced(text: Text, windows: int, context: int) -> torch.Tensor:
    starts = np.linspace(0, len(text) - context - 1, windows).astype(int)
    return torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64))
