"""The model in two stages, its data, and what a task of a stage is to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from atoll.strategies.volunteer.checks import Wanted

INPUTS, WIDTH, CLASSES = 32, 64, 10
STAGES: Final = 2


@dataclass(frozen=True)
class Course:
    """micros: of a step, of `samples` each. sample_s: what a device of power 1 pretends to take for a sample in each
    direction, beside what it takes."""

    steps: int
    seed: int
    micros: int = 4
    samples: int = 16
    sample_s: float = 0.004
    token: str = "volunteers only"

    def batch(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [samples, INPUTS] and classes [samples], those of a fixed teacher."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 1_009 + micro)
        inputs = torch.randn(self.samples, INPUTS, generator=draw)
        teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(7))
        return inputs, (inputs @ teacher).argmax(dim=1)


def stage_of(number: int) -> nn.Module:
    """The same weights wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11 + number)
        if number == 0:
            return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


def forward(stage: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """[inputs] -> [activations]."""
    with torch.no_grad():
        return [stage(given[0])]


def backward(stage: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """[inputs, gradients of the activations] -> [gradient of the weights [P]], activations computed again."""
    stage.zero_grad()
    torch.autograd.backward(stage(given[0]), given[1])
    return [_flat(stage)]


def last(stage: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """[activations, classes] -> [their gradient, gradient of the weights [P], sum of the losses [1]]."""
    stage.zero_grad()
    activations = given[0].clone().requires_grad_()
    loss = nn.functional.cross_entropy(stage(activations), given[1], reduction="sum")
    torch.autograd.backward(loss)
    assert activations.grad is not None
    return [activations.grad, _flat(stage), loss.detach().reshape(1)]


COMPUTE: Final = {"forward": forward, "backward": backward, "last": last}


def wanted(work: str, samples: int, size: int) -> list[Wanted]:
    """Shapes and dtypes of a task's answer. size: P, of the stage."""
    rows: Wanted = ((samples, WIDTH), torch.float32)
    weights: Wanted = ((size,), torch.float32)
    return {"forward": [rows], "backward": [weights], "last": [rows, weights, ((1,), torch.float32)]}[work]


def load(stage: nn.Module, weights_P: torch.Tensor) -> None:
    parameters = list(stage.parameters())
    with torch.no_grad():
        for one, piece in zip(parameters, torch.split(weights_P, [p.numel() for p in parameters]), strict=True):
            one.copy_(piece.reshape(one.shape))


def _flat(stage: nn.Module) -> torch.Tensor:
    return torch.cat([one.grad.reshape(-1) for one in stage.parameters() if one.grad is not None])
