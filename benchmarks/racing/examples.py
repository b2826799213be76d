"""Examples to train on and to judge by, in domains that differ: each island may see another one's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from data import mnist
from words import next_words

from racing.domains import DOMAINS, Text, domain

JUDGED_WINDOWS: Final = 32
JUDGED_ROWS: Final = 1024
DIGITS: Final = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
WORD_BYTES: Final = 1_000_000
"""Of a domain's text that words are read from: what is looked at as a whole once takes a minute otherwise."""


class Examples(Protocol):
    """A domain's examples in their order."""

    @property
    def units(self) -> int:
        """What they can be cut between."""

    def between(self, start: int, stop: int) -> Examples:
        """Of the units from start on, before stop."""

    def __len__(self) -> int: ...

    def at(self, places: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [n, ...]."""

    def spaced(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some from one end to the other, to judge by."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Each window of `context` bytes with the byte that follows each: int64 [n, context] twice."""

    text: Text
    context: int

    @property
    def units(self) -> int:
        return len(self.text)

    def between(self, start: int, stop: int) -> Windows:
        return Windows(self.text[start:stop], self.context)

    def __len__(self) -> int:
        return len(self.text) - self.context - 1

    def at(self, places: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = np.stack([self.text[start : start + self.context + 1] for start in places])
        both = torch.from_numpy(windows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def spaced(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.at(np.linspace(0, len(self), JUDGED_WINDOWS).astype(int))


@dataclass(frozen=True, slots=True)
class Rows:
    """Pairs that lie beside each other: inputs [n, ...], targets [n]."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def units(self) -> int:
        return len(self.targets)

    def between(self, start: int, stop: int) -> Rows:
        return Rows(self.inputs[start:stop], self.targets[start:stop])

    def __len__(self) -> int:
        return len(self.targets)

    def at(self, places: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(list(places))
        return self.inputs[chosen], self.targets[chosen]

    def spaced(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.at(np.linspace(0, len(self), min(JUDGED_ROWS, len(self)), endpoint=False).astype(int))


Domains = Sequence[tuple[Examples, Examples]]
"""Of each domain what is trained on, and what is held out."""


def byte_domains(context: int) -> Domains:
    return [(Windows(train, context), Windows(held_out, context)) for train, held_out in map(domain, DOMAINS)]


def word_domains(rows: int, words: int) -> Domains:
    """The next word by hashed n-grams, as in examples/words.py, with one vocabulary for the text of all domains."""
    texts = [text[:WORD_BYTES] for name in DOMAINS for text in domain(name)]
    ends = np.cumsum([len(next_words(torch.from_numpy(text.copy()), rows, words)) + 3 for text in texts])
    joined = np.concatenate([np.append(text, np.uint8(ord("\n"))) for text in texts])
    inputs, targets = next_words(torch.from_numpy(joined), rows, words).tensors
    parts = [
        Rows(inputs[start : end - 3], targets[start : end - 3])
        for start, end in zip((0, *ends[:-1]), ends, strict=True)
    ]
    return list(zip(parts[::2], parts[1::2], strict=True))


def digit_domains() -> Domains:
    """MNIST, a few digits a domain."""
    return [
        (_of(train, digits), _of(test, digits))
        for digits in DIGITS
        for train, test in [[one.tensors for one in mnist()]]
    ]


def _of(tensors: Sequence[torch.Tensor], digits: Sequence[int]) -> Rows:
    images, labels = tensors
    chosen = torch.isin(labels, torch.tensor(digits))
    return Rows(images[chosen], labels[chosen])
