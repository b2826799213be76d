"""Measures what each layer costs on this device: seconds and bytes of a micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.pipeline.layers import Layers, checked
from atoll.agent.runtime.session.throttle import Throttle

TIMES: Final = 3
"""A layer is run so often; the fastest counts."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of a layer for one micro-batch. activation_bytes: its output. kept_bytes: kept for its backward pass."""

    forward_s: float
    backward_s: float
    activation_bytes: int
    kept_bytes: int


def measured(layers: Layers, inputs: Any, seed: int, device: torch.device, throttle: Throttle) -> tuple[LayerCost, ...]:
    """Measure every layer in turn; only one is in memory at a time. inputs: of the first layer, on the device.
    Raises BadInput for a layer whose output is no tensor."""
    costs = []
    for number, name in enumerate(layers.names):
        layer = layers.made(number, seed)
        made_here = layer is not layers.given[number]
        layer.to(device)
        buffers = [one.clone() for one in layer.buffers()]  # statistics of norms: this was no training
        cost, inputs = _of_layer(name, layer, inputs, device, throttle)
        costs.append(cost)
        with torch.no_grad():
            for one, before in zip(layer.buffers(), buffers, strict=True):
                one.copy_(before)
        for one in layer.parameters():
            one.grad = None
        if not made_here:
            layer.to("cpu")
    return tuple(costs)


def _of_layer(
    name: str, layer: nn.Module, inputs: Any, device: torch.device, throttle: Throttle
) -> tuple[LayerCost, torch.Tensor]:
    forward_s, backward_s = [], []
    kept = _SavedBytes()
    for _ in range(TIMES):
        kept.bytes = 0
        given = inputs
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            given = given.detach().clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(kept.packed, lambda one: one):
            seconds, output = _timed(device, throttle, partial(_called, layer, given))
        forward_s.append(seconds)
        output = checked(name, layer, output)
        if output.requires_grad:
            gradient = torch.zeros_like(output)
            seconds, _ = _timed(device, throttle, partial(torch.autograd.backward, output, gradient))
            backward_s.append(seconds)
    cost = LayerCost(min(forward_s), min(backward_s, default=0.0), output.nbytes, kept.bytes)
    return cost, output.detach()


def _called(layer: nn.Module, given: Any) -> Any:
    """Call a layer with an input that is no leaf, since it may work in place."""
    return layer(given.clone() if isinstance(given, torch.Tensor) and given.requires_grad else given)


class _SavedBytes:
    def __init__(self) -> None:
        self.bytes = 0

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor


def _timed(device: torch.device, throttle: Throttle, work: Callable[[], Any]) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    throttle.resume()
    begun_s = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    throttle.pay()
    return time.perf_counter() - begun_s, result
