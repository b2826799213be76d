"""Models whose passes wait as long as a device would compute: workers on few cores are as independent as devices.

resnet: ResNet-18 of half the width, 62 tensors, early layers slow and small. gpt: six blocks of width 192, 76 tensors
of a few sizes. words: a table that is two thirds of the model, and four layers. About 2.9 M parameters each.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

Shape = tuple[int, ...]
FORWARD_SHARE: Final = 1 / 3


@dataclass(frozen=True, slots=True)
class PacedLayer:
    """shapes: of its tensors. work: its part of the passes, relative."""

    shapes: tuple[Shape, ...]
    work: float


def resnet() -> list[PacedLayer]:
    def convolution(inputs: int, outputs: int, kernel: int, side: int) -> PacedLayer:
        shapes = ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))
        return PacedLayer(shapes, inputs * outputs * kernel**2 * side**2)

    layers, channels = [convolution(3, 32, 7, 112)], 32
    for width, side in ((32, 56), (64, 28), (128, 14), (256, 7)):
        for block in range(2):
            layers += [convolution(channels, width, 3, side), convolution(width, width, 3, side)]
            if block == 0 and width > 32:
                layers.append(convolution(channels, width, 1, side))
            channels = width
    return [*layers, PacedLayer(((1000, 256), (1000,)), 256_000)]


def gpt() -> list[PacedLayer]:
    width = 192
    norm = PacedLayer(((width,), (width,)), width)

    def linear(inputs: int, outputs: int) -> PacedLayer:
        return PacedLayer(((outputs, inputs), (outputs,)), inputs * outputs)

    block = [norm, linear(width, 3 * width), linear(width, width), norm]
    block += [linear(width, 4 * width), linear(4 * width, width)]
    tables = [PacedLayer(((1024, width),), width), PacedLayer(((256, width),), width)]
    return [*tables, *(block * 6), norm]


def words() -> list[PacedLayer]:
    layers = [PacedLayer(((40_000, 48),), 2e5)]
    for inputs, outputs in ((144, 512), (512, 512), (512, 512), (512, 768)):
        layers.append(PacedLayer(((outputs, inputs), (outputs,)), inputs * outputs))
    return layers


MODELS: Final = {"resnet": resnet, "gpt": gpt, "words": words}


class _Wait(torch.autograd.Function):
    """Waits in both passes. The gradients are noise, a little other in each pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)  # the pretended work, not a wait for anything
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer = ctx.layer
        time.sleep(layer.backward_s)
        return grad, None, *layer.gradients()


class _Layer(nn.Module):
    def __init__(self, shapes: tuple[Shape, ...], seconds: float, noise: torch.Tensor) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.forward_s, self.backward_s = seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE)
        self._noise, self._turn = noise, 0

    def gradients(self) -> list[torch.Tensor]:
        self._turn += 1
        found = []
        for place, one in enumerate(self.tensors):
            begin = (977 * self._turn + 31 * place) % (len(self._noise) - one.numel())
            found.append(self._noise[begin : begin + one.numel()].view(one.shape))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = _Wait.apply(x, self, *self.tensors)  # type: ignore[no-untyped-call]
        return waited


class PacedModel(nn.Module):
    """seconds: of both passes. Each worker's gradients are others."""

    def __init__(self, name: str, seconds: float, rank: int) -> None:
        super().__init__()
        layers = MODELS[name]()
        work = sum(layer.work for layer in layers)
        largest = max(math.prod(shape) for layer in layers for shape in layer.shapes)
        noise = torch.randn(2 * largest, generator=torch.Generator().manual_seed(rank)).pow_(3).mul_(1e-3)
        self.layers = nn.Sequential(*(_Layer(one.shapes, seconds * one.work / work, noise) for one in layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.requires_grad_())
        return found
