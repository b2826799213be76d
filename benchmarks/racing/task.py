"""The race's tasks: island-lm, a byte-level GPT on four domains of text, the next word of them, and a CNN on MNIST's
digits, spread over islands.

Held-out loss is the mean over the domains, in nats a byte, a word or an image, on the same ones for every method."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from byte_gpt import ByteGPT
from words import NextWord

from racing.examples import Domains, Examples, byte_domains, digit_domains, word_domains

PARTITIONS: Final = ("P0", "P1", "P2", "P3")
DIRICHLET: Final = 0.3


class Size(Hashable, Protocol):
    """One task: what is trained, and on what."""

    @property
    def batch(self) -> int:
        """Examples of an island in a step."""

    @property
    def rate(self) -> float:
        """Of the byte GPT's learning rates: what is tried is so many times as large."""

    def model(self) -> nn.Module:
        """Its output is logits [..., classes]."""

    def domains(self) -> Domains: ...


@dataclass(frozen=True, slots=True)
class Bytes:
    width: int
    layers: int
    context: int
    batch: int  # sequences
    rate: float = 1.0

    def model(self) -> nn.Module:
        return UntiedGPT(self.width, self.layers, self.context)

    def domains(self) -> Domains:
        return byte_domains(self.context)


@dataclass(frozen=True, slots=True)
class Words:
    """The next of `words` words by rows of a table."""

    rows: int
    width: int
    words: int
    batch: int
    rate: float = 16.0

    def model(self) -> nn.Module:
        return NextWord(self.rows, self.width, self.words, sparse=False)

    def domains(self) -> Domains:
        return word_domains(self.rows, self.words)


@dataclass(frozen=True, slots=True)
class Digits:
    batch: int
    rate: float = 4.0

    def model(self) -> nn.Module:
        """Tensors of whole blocks, which the race's codecs want: 16 classes, of which 10 are there."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, bias=False), nn.ReLU(),
            nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 16),
        )  # fmt: skip

    def domains(self) -> Domains:
        return digit_domains()


SIZES: Final[dict[str, Size]] = {
    "XXS": Bytes(width=64, layers=2, context=64, batch=8),
    "XS": Bytes(width=64, layers=4, context=64, batch=16),
    "S": Bytes(width=128, layers=4, context=128, batch=16),
    "M": Bytes(width=256, layers=4, context=128, batch=16),
    "L": Bytes(width=512, layers=4, context=128, batch=16),
    "124M": Bytes(width=896, layers=13, context=256, batch=8, rate=0.3),
    "words": Words(rows=8192, width=16, words=512, batch=64),
    "cnn": Digits(batch=16),
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


@cache
def domains_of(size: Size) -> Domains:
    return size.domains()


@dataclass(frozen=True, slots=True)
class Shard:
    """What one island trains on. speed: relative to the fastest. batches: examples of a step for one that an island has
    on average, by its speed, as plans split them."""

    parts: tuple[Examples, ...]
    weights: tuple[float, ...]  # of the parts, sum 1
    speed: float = 1.0
    batches: float = 1.0


def shards(size: Size, partition: str, islands: int, seed: int) -> list[Shard]:
    """The islands' data. P0: disjoint parts of every domain. P1: one domain an island. P2: domains mixed by
    Dirichlet(0.3). P3: as P0 with sizes 8:4:2:1, speeds 4:2:1:1 and batches by speed."""
    domains = [train for train, _ in domains_of(size)]
    even = tuple(1 / len(domains) for _ in domains)
    match partition:
        case "P1":
            return [Shard((domains[i % len(domains)],), (1.0,)) for i in range(islands)]
        case "P2":
            mixes = np.random.default_rng(seed).dirichlet([DIRICHLET] * len(domains), islands)
            cut = [_cut(one, [1.0] * islands) for one in domains]
            return [
                Shard(tuple(parts[i] for parts in cut), tuple(float(weight) for weight in mix))
                for i, mix in enumerate(mixes)
            ]
        case "P0" | "P3":
            sizes = [1.0] * islands if partition == "P0" else [2.0 ** (islands - 1 - i) for i in range(islands)]
            speeds = [1.0] * islands if partition == "P0" else [max(0.25, 0.5**i) for i in range(islands)]
            cut = [_cut(one, sizes) for one in domains]
            mean = sum(speeds) / islands
            return [
                Shard(tuple(parts[i] for parts in cut), even, speed, speed / mean) for i, speed in enumerate(speeds)
            ]
        case _:
            raise SystemExit(f"race: no partition {partition!r}; there are {', '.join(PARTITIONS)}")


def _cut(examples: Examples, sizes: Sequence[float]) -> list[Examples]:
    """Parts one after the other, as large beside each other as `sizes`."""
    ends = [int(end * examples.units) for end in np.cumsum(sizes) / sum(sizes)]
    return [examples.between(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def everything(size: Size) -> Shard:
    """All data on one island."""
    domains = domains_of(size)
    return Shard(tuple(train for train, _ in domains), tuple(1 / len(domains) for _ in domains))


class Batches:
    """Random examples of a shard: the same (seed, island, step) gives the same batch to every method."""

    def __init__(self, shard: Shard, size: Size, seed: int, island: int) -> None:
        self._shard, self._seed, self._island = shard, seed, island
        self.rows = max(1, round(size.batch * shard.batches))

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [batch, ...]."""
        random = np.random.default_rng((self._seed, self._island, step))
        chosen = random.choice(len(self._shard.parts), self.rows, p=self._shard.weights)
        parts = [self._shard.parts[one] for one in chosen]
        rows = [part.at([int(random.integers(len(part)))]) for part in parts]
        inputs, targets = zip(*rows, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class Task:
    """One model that every island instantiates, with its held-out windows. Parameters are one flat vector theta [N].

    device: holds the model and all vectors. On a GPU passes are in bfloat16 by autocast, the rest in float32."""

    def __init__(self, size: Size, seed: int, device: str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        torch.manual_seed(seed)
        self.model = size.model().to(self.device)  # initialised on the CPU: the same weights on every device
        self._parameters = list(self.model.parameters())
        self.shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self.initial = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        self.entries = self.initial.numel()
        self._held_out = [self._moved(examples.spaced()) for _, examples in domains_of(size)]
        self._gradient = torch.zeros_like(self.initial)
        self.loss = 0.0
        for parameter, part_N in zip(self._parameters, self.tensors(self._gradient), strict=True):
            parameter.grad = part_N

    def own_model(self) -> nn.Module:
        """The model with parameters of its own, where the race's are of one vector. The race's no more."""
        for parameter in self._parameters:
            parameter.grad, parameter.data = None, parameter.data.clone()
        return self.model

    def gradient(self, theta: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of the mean loss at theta [N], which is in `loss` then. Returns float32 [N], overwritten by the next call."""
        self._load(theta)
        self._gradient.zero_()
        loss = self._loss(*self._moved((inputs, targets)))
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.item()
        return self._gradient

    @torch.no_grad()
    def held_out(self, theta: torch.Tensor) -> float:
        """Mean over the domains, nats a target."""
        self._load(theta)
        losses = [self._loss(inputs, targets).item() for inputs, targets in self._held_out]
        return sum(losses) / len(losses)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return loss_of(self.model(inputs), targets)

    def _moved(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = pair
        return inputs.to(self.device), targets.to(self.device)

    def _load(self, theta: torch.Tensor) -> None:
        for parameter, part in zip(self._parameters, self.tensors(theta), strict=True):
            parameter.data = part

    def tensors(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """Views of theta [N], by the parameters' shapes."""
        return [part.view(shape) for part, shape in zip(torch.split(theta, self._sizes), self.shapes, strict=True)]

    def blocks(self) -> Sequence[slice]:
        """The tensors' places in theta."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [slice(int(end) - int(np.prod(shape)), int(end)) for end, shape in zip(ends, self.shapes, strict=True)]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits [..., classes], nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
