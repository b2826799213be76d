"""Checks what volunteers answer: shape, numbers, size, and now and then against the server's own computing."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import torch

PROBATION: Final = 4
"""First answers of a client: each is computed twice, so that who lies from the beginning never counts."""
SHARE: Final = 0.1
"""Share of later answers that are computed twice. A client that starts to lie is found after ten answers on average,
and then all of its answers are checked."""
MOST_DIFFERENT: Final = 2
"""Answers that differ from the server's own: one may be an accident of the client's memory."""
TOLERANCE: Final = 0.05
"""Largest difference of two answers, |a - b| / |b|: other hardware and orders of sums differ by far less, other
gradients by 1."""
NORM_FACTOR: Final = 10.0
_REMEMBERED, _ENOUGH = 64, 8


Wanted = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


class Suspicion(StrEnum):
    """Flaws of an answer by itself. The first two are refused; the last makes the server compute it too."""

    SHAPE = "its shape or dtype is another"
    NUMBERS = "it has numbers that are none"
    NORM = "its norm is far from the others'"


def of_content(answers: Sequence[torch.Tensor], wanted: Sequence[Wanted]) -> Suspicion | None:
    """Return a flaw that the answer itself shows. wanted: of each of its tensors."""
    if [(tuple(one.shape), one.dtype) for one in answers] != [(tuple(shape), dtype) for shape, dtype in wanted]:
        return Suspicion.SHAPE
    if not all(bool(torch.isfinite(one).all()) for one in answers if one.is_floating_point()):
        return Suspicion.NUMBERS
    return None


def difference(answers: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> float:
    """|a - b| / |b| over all tensors of an answer and the server's own; 0 where both are 0."""
    apart = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(answers, own, strict=True)))
    size = math.sqrt(sum(float(one.double().square().sum()) for one in own))
    return apart / size if size else (math.inf if apart else 0.0)


class NormBound:
    """Learned of the answers that counted, whoever gave them, so that no client can move it by itself."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def exceeded(self, norm: float) -> bool:
        """norm: of a sample in the mean."""
        return len(self._recent) >= _ENOUGH and norm > NORM_FACTOR * statistics.median(self._recent)

    def learn(self, norm: float) -> None:
        self._recent.append(norm)


@dataclass(slots=True)
class _Record:
    answers: int = 0
    compared: int = 0
    differed: list[float] = field(default_factory=list)


class Comparisons:
    """Choice of the answers that are computed twice, and the results. draw: seeded by a number that no client knows."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._clients: dict[str, _Record] = {}

    def due(self, client: str) -> bool:
        """Return True if this answer is to be computed twice; call once for each."""
        here = self._clients.setdefault(client, _Record())
        here.answers += 1
        share = 1.0 if here.differed or here.answers <= PROBATION else SHARE
        return self._draw.random() < share

    def compared(self, client: str, differs: float) -> str | None:
        """Record a comparison. Return why the client is to be shut out, or None."""
        here = self._clients.setdefault(client, _Record())
        here.compared += 1
        if differs <= TOLERANCE:
            return None
        here.differed.append(differs)
        if len(here.differed) < MOST_DIFFERENT:
            return None
        return (
            f"{len(here.differed)} of its {here.answers} answers differ from the server's own by "
            f"{', '.join(f'{one:.2g}' for one in here.differed)} of their size; at most {TOLERANCE:g} is rounding"
        )

    def forget(self, client: str) -> None:
        self._clients.pop(client, None)
