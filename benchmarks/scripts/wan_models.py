"""The models of benchmarks/wan.py, about 25 M parameters each, with real data that ships inside packages.

mlp:   MNIST, 784-4096-4096-1280-10; SGD with momentum
gpt:   bytes of English prose, 8 blocks of width 512, context 64; AdamW
words: the next of 2,048 words from hashed 1-, 2- and 3-grams before it, 500,000 rows of 48 with dense gradients; SGD
words-sparse: the same with sparse gradients; Adagrad
table: the same, but which of 15 frequent words is next, or none of them: the table is all but 784 of its parameters
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))

import data
from byte_gpt import ByteGPT
from words import NextWord, next_words

CONTEXT: Final = 64
WORDS: Final = 2048  # the last one stands for all that are rarer
FEW_WORDS: Final = 16


@dataclass(frozen=True, slots=True)
class Task:
    """A model with its data, its optimizer and how many samples a worker takes of it in a step."""

    build: Callable[[bool], nn.Module]  # True: a tiny one
    dataset: Callable[[bool], TensorDataset]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the model's output and the targets
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    state_copies: int  # floats of optimizer state per parameter
    held_out: int  # samples that nobody trains on

    def split(self, tiny: bool) -> tuple[TensorDataset, TensorDataset]:
        """What is trained on, and what is not: the last samples."""
        whole = self.dataset(tiny)
        held_out = min(self.held_out, len(whole) // 10)
        return TensorDataset(*(one[:-held_out] for one in whole.tensors)), TensorDataset(
            *(one[-held_out:] for one in whole.tensors)
        )


def build_mlp(tiny: bool) -> nn.Module:
    sizes = (784, 32, 32, 16, 10) if tiny else (784, 4096, 4096, 1280, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(4):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_gpt(tiny: bool) -> nn.Module:
    width, layers = (32, 2) if tiny else (512, 8)
    gpt = ByteGPT(width=width, layers=layers, heads=width // 64 or 1, context=CONTEXT)
    for embedding in (gpt.token, gpt.position):
        nn.init.normal_(
            embedding.weight, std=0.02
        )  # as GPT-2; torch's 1.0, tied to the output, begins at a loss of 200
    return nn.Sequential(gpt, nn.Flatten(0, 1))


def build_words(tiny: bool, *, sparse: bool = False, words: int = WORDS) -> nn.Module:
    return NextWord(*rows_and_width(tiny), words, sparse=sparse)


def rows_and_width(tiny: bool) -> tuple[int, int]:
    return (1000, 8) if tiny else (500_000, 48)


def prose(tiny: bool) -> TensorDataset:
    stream = data.text()[: 100_000 if tiny else None].clone()  # out of the mapped file: its pages would count as memory
    windows = (len(stream) - 1) // CONTEXT
    return TensorDataset(
        stream[: windows * CONTEXT].view(windows, CONTEXT).int(),
        stream[1 : windows * CONTEXT + 1].view(windows, CONTEXT).long(),
    )


def grams(tiny: bool, words: int = WORDS) -> TensorDataset:
    return next_words(data.text()[: 100_000 if tiny else None], rows_and_width(tiny)[0], words)


def flat_cross_entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, targets.flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=5.0, fused=True)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, fused=True)


TASKS: Final[Mapping[str, Task]] = {
    "mlp": Task(
        build_mlp, lambda _: data.mnist()[0], flat_cross_entropy, momentum, batch=64, state_copies=1, held_out=2000
    ),
    "gpt": Task(build_gpt, prose, flat_cross_entropy, adamw, batch=4, state_copies=2, held_out=64),
    "words": Task(build_words, grams, flat_cross_entropy, sgd, batch=256, state_copies=0, held_out=4096),
    "words-sparse": Task(
        partial(build_words, sparse=True), grams, flat_cross_entropy, adagrad, batch=256, state_copies=0, held_out=4096
    ),
    "table": Task(
        partial(build_words, sparse=True, words=FEW_WORDS),
        partial(grams, words=FEW_WORDS),
        flat_cross_entropy,
        adagrad,
        batch=256,
        state_copies=0,
        held_out=4096,
    ),
}
