"""The part that every method shares: replicas of the model on one flat vector each, and the inner optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from atoll.strategies.shared_params.second_moments import SecondMoments
from racing.clock import Exchange
from racing.task import Batches, Task

CLIP: Final = 1.0
WARM_UP: Final = 0.05
FLOOR: Final = 0.1


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then a cosine down to a tenth."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


class Replica:
    """One copy of the weights theta [N] with AdamW (0.9, 0.95), weight decay 0.1, gradients clipped to norm 1."""

    def __init__(self, task: Task, batches: Batches, peak: float, steps: int) -> None:
        self.task, self._batches, self._peak, self._steps = task, batches, peak, steps
        self.theta = task.initial.clone()
        self._parameters = [nn.Parameter(part_N) for part_N in task.tensors(self.theta)]
        self._adam = torch.optim.AdamW(self._parameters, lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.rows = batches.rows
        """Of a whole batch: so its updates weigh beside the others'."""
        self.away = False
        """It neither trains nor exchanges now, and has what the others did when it is back."""
        self.second_moments = SecondMoments([self._adam], self._parameters)

    def gradient(self, step: int, theta_N: torch.Tensor) -> torch.Tensor:
        """Of this replica's batch at these weights: float32 [N], overwritten by the next call of any replica."""
        inputs, targets = self._batches.at(step)
        return self.task.gradient(theta_N, inputs, targets)

    def update(self, gradient_N: torch.Tensor, step: int) -> None:
        """One AdamW step on the clipped gradient."""
        norm = gradient_N.norm()
        clipped_N = gradient_N * torch.clamp(CLIP / (norm + 1e-6), max=1.0)
        for parameter, part_N in zip(self._parameters, self.task.tensors(clipped_N), strict=True):
            parameter.grad = part_N
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._peak, step, self._steps)
        self._adam.step()

    def local_step(self, step: int) -> None:
        if not self.away:
            self.update(self.gradient(step, self.theta), step)


def present(replicas: Sequence[Replica]) -> list[Replica]:
    return [one for one in replicas if not one.away]


def shares(replicas: Sequence[Replica]) -> list[float]:
    """Of those who are there, of a whole batch: sum 1."""
    rows = [one.rows for one in present(replicas)]
    return [one / sum(rows) for one in rows]


def mean_of(parts: Sequence[torch.Tensor], replicas: Sequence[Replica]) -> torch.Tensor:
    """Of a part [N] from each that is there, by their shares."""
    return torch.stack([share * part_N for share, part_N in zip(shares(replicas), parts, strict=True)]).sum(0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tuned: a peak learning rate, and what the method itself takes."""

    learning_rate: float = 2e-3
    outer_learning_rate: float = 1.0
    momentum: float = 0.0


class Method(Protocol):
    """One way to train on several islands. The step loop asks for steps 0, 1, 2, ... in turn."""

    def step(self, step: int) -> Sequence[Exchange]:
        """Train every island one step; return what was exchanged."""

    def consolidated(self) -> torch.Tensor:
        """The one model that all share after the last step: theta [N]."""


def ring(payload_bytes: float, islands: int, *, after: int, due: int, overlap: float = 0.0) -> Exchange:
    """A ring all-reduce: every island sends and receives 2 (K - 1) / K of the payload."""
    moved = 2 * (islands - 1) / islands * payload_bytes
    return Exchange(after, due, moved, moved, overlap, hops=2 * (islands - 1))


def gather(payload_bytes: float, islands: int, *, after: int, due: int, overlap: float = 0.0) -> Exchange:
    """Everybody's part to everybody: K - 1 payloads out and K - 1 in."""
    moved = (islands - 1) * payload_bytes
    return Exchange(after, due, moved, moved, overlap, hops=1)
