"""Executes a batch on one stage of a pipeline: forward and backward passes of its micro-batches, by 1F1B.

In place of torch.distributed.pipelining's Schedule1F1B: that one's sends and receives are collectives of one process
group and of fixed shapes, which cannot be given up when a neighbour is lost and do not reach another island. Here each
activation is a frame of the run's transport, with its own shape, authenticated, and waited for with a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.schedule import Direction, after_last_forward, until_last_forward
from atoll.agent.runtime.pipeline.script_autocast import ScriptAutocast
from atoll.agent.runtime.pipeline.wire import StageLinks, StagePurpose
from atoll.agent.runtime.session.throttle import Throttle
from atoll.errors import BadInput

CLIP_EPSILON: Final = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def clip_over_stages(parameters: Iterable[torch.Tensor], max_norm: float, links: StageLinks) -> float:
    """Bring the gradient's global L2 norm, over all stages, down to max_norm. All stages call it together. Returns the
    norm before, the same on each. Raises PeerLost."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    own = sum(float(one.detach().double().square().sum()) for one in gradients)
    norm = math.sqrt(links.add_up(own))
    factor = max_norm / (norm + CLIP_EPSILON)
    if factor < 1 or math.isnan(norm):
        for one in gradients:
            one.detach().mul_(factor)
    return norm


class WeightStash:
    """Weights as they were, for a micro-batch whose forward pass came before an update and whose backward pass comes
    after: both with the same weights, so that what comes out is a gradient. Source: weight stashing, Narayanan et al.,
    PipeDream, 2019, section 3.3.

    A copy of what trains in a stage. For a while the parameters have it in place of their own memory; who holds that
    beside them, as averages do, does not notice."""

    def __init__(self, stage: nn.Module) -> None:
        self._kept = [(one, one.detach().clone()) for one in stage.parameters() if one.requires_grad]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass with these weights. What it saves of them for the backward pass is this copy, whose updates
        autograd would otherwise believe to see: they share the parameter's version."""
        with self.in_place(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
            yield

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The stage has these weights. For a backward pass: it may compute activations again."""
        now = [one.data for one, _ in self._kept]
        for one, kept in self._kept:
            one.data = kept
        try:
            yield
        finally:
            for (one, _), data in zip(self._kept, now, strict=True):
                one.data = data


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """share: of the batch's samples. fetch: (inputs, targets) on the device; called where the stage needs either."""

    share: float
    fetch: Callable[[], tuple[Any, Any]]


class _UnderWay(NamedTuple):
    """Micro-batch between its two passes. inputs: received; output: computed from them. stash: its weights if an
    update comes between."""

    inputs: Any
    output: torch.Tensor
    stash: WeightStash | None


class StageExecutor:
    """Used by the training thread. Gradients add up in p.grad; updates are its caller's.

    Where its caller knows the next batch before this one is over, a stage makes forward passes of that while it would
    wait for this one's last backward passes: with the weights that it has, which it keeps for their backward passes."""

    def __init__(
        self,
        stage: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        links: StageLinks,
        device: torch.device,
        throttle: Throttle,
    ) -> None:
        self._stage, self._loss, self._links, self._device, self._throttle = stage, loss, links, device, throttle
        self._under_way: dict[tuple[int, int], _UnderWay] = {}  # by batch and micro-batch
        self._made = 0  # forward passes of the next batch
        self._autocast = ScriptAutocast(device.type)

    @property
    def place(self) -> StagePlace:
        return self._links.place

    def run(self, micros: Sequence[MicroBatch], following: Callable[[], Sequence[MicroBatch]] = tuple) -> float:
        """All passes of a batch that were not made before. Returns its mean loss on the last stage, 0 on the others.
        Raises PeerLost, BadInput for what cannot go through a pipeline.

        following: the next batch that this will be called for, if it is known: asked once, when this one's forward
        passes are made, on all stages but the last, which has nothing to wait for."""
        self._autocast = ScriptAutocast.current(self._device.type)
        with self._autocast.left():
            return self._run(micros, following)

    def _run(self, micros: Sequence[MicroBatch], following: Callable[[], Sequence[MicroBatch]]) -> float:
        self._throttle.resume()
        place, batch, stash = self.place, self._links.batch, None
        losses: list[torch.Tensor] = []
        made, self._made = self._made, 0
        for direction, micro, _ in until_last_forward(place.stage, place.stages, len(micros), made):
            if direction is Direction.FORWARD:
                losses += self._forward(batch, micro, micros[micro])
            else:
                self._backward(batch, micro)
        upcoming = following() if not place.last else ()
        for direction, micro, _ in after_last_forward(place.stage, place.stages, len(micros), len(upcoming)):
            if direction is Direction.FORWARD:
                stash = stash or WeightStash(self._stage)
                self._forward(batch + 1, micro, upcoming[micro], stash)
                self._made += 1
            else:
                self._backward(batch, micro)
        # Read together, once the batch's last pass is queued: a number read between two passes would keep the host from
        # queueing the next one until the device is done.
        return sum(torch.stack(losses).tolist()) if losses else 0.0

    def _forward(
        self, batch: int, number: int, micro: MicroBatch, stash: WeightStash | None = None
    ) -> list[torch.Tensor]:
        """Returns the loss by its share of the batch, [], on the last stage; nothing on the others."""
        fetched: tuple[Any, Any] = micro.fetch() if self.place.first or self.place.last else (None, None)
        inputs: Any = fetched[0] if self.place.first else self._received(StagePurpose.FORWARD, batch, number)
        if not self.place.first and inputs.is_floating_point():
            inputs.requires_grad_()
        # Its first layer may work in place, which a leaf forbids.
        given = inputs.clone() if isinstance(inputs, torch.Tensor) and inputs.requires_grad else inputs
        with stash.forward() if stash is not None else nullcontext(), self._autocast.forward():
            output = self._stage(given)
            loss = self._loss(output, fetched[1]) if self.place.last else None
        if loss is None:
            self._under_way[batch, number] = _UnderWay(inputs, output, stash)
            self._throttle.pay()
            self._links.send(StagePurpose.FORWARD, batch, number, output)
            return []
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch")
        weighted = loss * micro.share
        self._under_way[batch, number] = _UnderWay(inputs, weighted, None)
        self._throttle.pay()
        return [weighted.detach().double().reshape(())]

    def _backward(self, batch: int, number: int) -> None:
        inputs, output, stash = self._under_way.pop((batch, number))
        torch.clear_autocast_cache()  # of activations that the pass before computed again, maybe with other weights
        if self.place.last:
            output.backward()  # type: ignore[no-untyped-call]
        elif output.is_floating_point():
            gradient = self._received(StagePurpose.BACKWARD, batch, number)
            if gradient.shape != output.shape or gradient.dtype != output.dtype:
                raise BadInput(
                    f"the gradient of a stage's output came as {gradient.dtype} {tuple(gradient.shape)}, the output is "
                    f"{output.dtype} {tuple(output.shape)}. Do all ranks run the same script?"
                )
            if output.requires_grad:
                with stash.in_place() if stash is not None else nullcontext():
                    torch.autograd.backward(output, gradient)
        self._throttle.pay()
        if not self.place.first and inputs.is_floating_point():
            gradient = inputs.grad if inputs.grad is not None else torch.zeros_like(inputs)
            self._links.send(StagePurpose.BACKWARD, batch, number, gradient)

    def _received(self, purpose: StagePurpose, batch: int, number: int) -> torch.Tensor:
        self._throttle.pay()
        received = self._links.receive(purpose, batch, number, self._device)
        self._throttle.resume()  # all this was no computing
        return received
