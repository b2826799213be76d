"""Executes a batch on one stage of a pipeline: forward and backward passes of its micro-batches, by 1F1B.

In place of torch.distributed.pipelining's Schedule1F1B: that one's sends and receives are collectives of one process
group and of fixed shapes, which cannot be given up when a neighbour is lost and do not reach another island. Here each
activation is a frame of the run's transport, with its own shape, authenticated, and waited for with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.pipeline.places import StagePlace
from atoll.agent.runtime.pipeline.schedule import Direction, one_forward_one_backward
from atoll.agent.runtime.pipeline.wire import StageLinks, StagePurpose
from atoll.agent.runtime.step.measures.throttle import Throttle
from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """share: of the batch's samples. fetch: (inputs, targets) on the device; called where the stage needs either."""

    share: float
    fetch: Callable[[], tuple[Any, Any]]


class StageExecutor:
    """Used by the training thread. Gradients add up in p.grad; updates are its caller's."""

    def __init__(
        self,
        stage: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        links: StageLinks,
        device: torch.device,
        throttle: Throttle,
    ) -> None:
        self._stage, self._loss, self._links, self._device, self._throttle = stage, loss, links, device, throttle
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}  # by micro-batch: what came, what was made of it

    @property
    def place(self) -> StagePlace:
        return self._links.place

    def run(self, micros: Sequence[MicroBatch]) -> float:
        """All passes of a batch. Returns its mean loss on the last stage, 0 on the others. Raises PeerLost, BadInput
        for what cannot go through a pipeline."""
        if (
            torch.is_autocast_enabled(self._device.type)
            and torch.get_autocast_dtype(self._device.type) == torch.float16
        ):
            raise BadInput(
                "torch.autocast in float16 needs gradients that are scaled (GradScaler), which pipelines do not do: "
                "small ones would be lost. Use torch.autocast with dtype=torch.bfloat16"
            )
        self._under_way.clear()
        self._throttle.resume()
        loss = 0.0
        for direction, micro in one_forward_one_backward(self.place.stage, self.place.stages, len(micros)):
            if direction is Direction.FORWARD:
                loss += self._forward(micro, micros[micro])
            else:
                self._backward(micro)
        return loss

    def _forward(self, number: int, micro: MicroBatch) -> float:
        fetched: tuple[Any, Any] = micro.fetch() if self.place.first or self.place.last else (None, None)
        inputs: Any = fetched[0] if self.place.first else self._received(StagePurpose.FORWARD, number)
        if not self.place.first and inputs.is_floating_point():
            inputs.requires_grad_()
        # Its first layer may work in place, which a leaf forbids.
        output = self._stage(inputs.clone() if isinstance(inputs, torch.Tensor) and inputs.requires_grad else inputs)
        if not self.place.last:
            self._under_way[number] = (inputs, output)
            self._throttle.pay()
            self._links.send(StagePurpose.FORWARD, number, output)
            return 0.0
        loss = self._loss(output, fetched[1])
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch")
        weighted = loss * micro.share
        self._under_way[number] = (inputs, weighted)
        self._throttle.pay()
        return weighted.item()

    def _backward(self, number: int) -> None:
        inputs, output = self._under_way.pop(number)
        if self.place.last:
            output.backward()  # type: ignore[no-untyped-call]
        elif output.is_floating_point():
            gradient = self._received(StagePurpose.BACKWARD, number)
            if gradient.shape != output.shape or gradient.dtype != output.dtype:
                raise BadInput(
                    f"the gradient of a stage's output came as {gradient.dtype} {tuple(gradient.shape)}, the output is "
                    f"{output.dtype} {tuple(output.shape)}. Do all ranks run the same script?"
                )
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        self._throttle.pay()
        if not self.place.first and inputs.is_floating_point():
            gradient = inputs.grad if inputs.grad is not None else torch.zeros_like(inputs)
            self._links.send(StagePurpose.BACKWARD, number, gradient)

    def _received(self, purpose: StagePurpose, number: int) -> torch.Tensor:
        self._throttle.pay()
        received = self._links.receive(purpose, number, self._device)
        self._throttle.resume()  # all this was no computing
        return received
