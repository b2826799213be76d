"""Divides a step whose batch does not fit into memory: the script gets its part of the batch in several passes.

The script does not notice. To it each pass is a batch of the loader, with an update of its own. Up to the last one the
optimizers step over no parameters, and what else the script updates returns to its value before the step. Gradients
wait here meanwhile, where the script's zero_grad() and clipping do not reach them. All ranks make equally many passes,
so that collective calls in the script's loop still meet."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.step.optimizers.hollow_steps import hollow_optimizer, schedulers_of
from atoll.errors import BadInput

_TOO_LARGE: Final = "the batch does not fit into the devices' memory at once"


class DividedStep:
    """The passes of the step under way. Used by the training thread alone."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Tracked]
    ) -> None:
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._optimizers, self._tracked = optimizers, tracked
        self._hollow: dict[int, torch.optim.Optimizer] = {}
        self._gradients: list[torch.Tensor | None] | None = None  # of the passes so far, weighted
        self._states: list[tuple[Tracked, Any]] = []
        self._schedulers: Sequence[Tracked] | None = None  # that the run was not given; None: not looked for
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # an optimizer's, and its values before the step
        self.divided = False
        """The step has several passes."""
        self.partial = False
        """The pass under way is not the step's last."""
        self._passes = self._updates = 0  # backward passes and hollow updates since the script got its samples

    def begin(self, *, first: bool, last: bool) -> None:
        """The script gets the samples of a pass. Raises BadInput if the script makes its steps in another way."""
        if first and last:
            self.abort()
            return
        if first:
            self.abort()
            self._begin_first()
        elif not (self._passes and self._updates):
            raise BadInput(
                f"{_TOO_LARGE}, and this script cannot take it in parts: in a batch of the loader it made no backward "
                "pass by run.backward, or no optimizer.step(). Make both for each batch, without accumulating "
                "gradients over several, or use a smaller batch_size"
            )
        else:
            self._put_back()
        self.divided, self.partial = True, not last
        self._passes = self._updates = 0

    def begin_pass(self) -> None:
        """A backward pass begins. Raises BadInput for a second one in the same samples."""
        if not self.divided:
            return
        self._passes += 1
        if self._passes > 1:
            raise BadInput(
                f"{_TOO_LARGE}, and a script with several backward passes in a step cannot take it in parts. Add up "
                "the losses, or use a smaller batch_size"
            )
        self.restore()

    def restore(self) -> None:
        """Give p.grad the gradients of the passes before."""
        gradients, self._gradients = self._gradients, None
        for parameter, gradient in zip(self._parameters, gradients or (), strict=False):
            parameter.grad = gradient

    def end_pass(self) -> None:
        """A backward pass is over: of a partial one the gradients wait here."""
        if self.partial:
            self._gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def in_place_of(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which the optimizer's step() moves nothing, in a partial pass."""
        if id(optimizer) not in self._hollow:
            self._hollow[id(optimizer)] = hollow_optimizer(optimizer)
        return (self._hollow[id(optimizer)], *args[1:]), kwargs

    def updated(self) -> None:
        """The script made its update of a partial pass."""
        self._updates += 1

    def abort(self) -> None:
        """Forget the step under way: it will be trained again, or not be divided."""
        self._gradients, self._states, self._groups = None, [], []
        self.divided = self.partial = False
        self._passes = self._updates = 0

    def _begin_first(self) -> None:
        if self._schedulers is None:
            self._schedulers = schedulers_of(self._optimizers, self._tracked.values())
        stateful = [*self._tracked.values(), *self._schedulers]
        self._states = [(one, copy.deepcopy(one.state_dict())) for one in stateful]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._groups = [(group, copy.deepcopy(_without_parameters(group))) for group in groups]

    def _put_back(self) -> None:
        for one, state in self._states:
            one.load_state_dict(copy.deepcopy(state))
        for group, values in self._groups:
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                    group[key].copy_(value)  # captured graphs know the tensor
                else:
                    group[key] = value


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
