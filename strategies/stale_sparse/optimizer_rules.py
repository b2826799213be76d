"""Optimizers of torch that sparse ones replace: the rates of their parameter groups at a step, and layers with moments
and residuals beside shared parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.kernels.compress import block_count
from atoll.kernels.exchange_engine import Rule
from atoll.strategies.declaration import StrategySettings
from atoll.strategies.shared_params import layout
from atoll.strategies.shared_params.layout import Layer, shared_param_of, trained, zeros
from atoll.strategies.stale_sparse.settings import StaleSparse

GroupRates = tuple[float, float, float, float, float]  # lr, weight decay, momentum or beta1, beta2, epsilon


@dataclass(frozen=True, slots=True)
class Moments:
    """State of a rule for each entry, by the names that torch's optimizer has for it; None: not kept."""

    first: str | None
    second: str | None


class Rates:
    """Reader of an optimizer's groups. Its own `step` finds no gradients and does nothing: sparse rules replace it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises BadInput for what the sparse rules do not know."""
        if type(optimizer) not in _FAMILIES:
            known = ", ".join(family.__name__ for family in _FAMILIES)
            raise BadInput(
                f"strategy stale-sparse has no sparse form of {type(optimizer).__name__}; it knows {known} of "
                "torch.optim. Use one of these, or strategy dense"
            )
        self._optimizer = optimizer
        self.rules = [_rule(optimizer, index, group) for index, group in enumerate(optimizer.param_groups)]
        self._momentum = [bool(group.get("momentum")) for group in optimizer.param_groups]
        directions = {bool(group.get("maximize")) for group in optimizer.param_groups}
        if len(directions) > 1:
            raise BadInput("maximize differs between the optimizer's groups; strategy stale-sparse needs it alike")
        self.maximize = directions.pop()
        self._parameters = self._count()

    def moments(self, group: int) -> Moments:
        """Return the moments that the group's rule keeps."""
        if self.rules[group] in ("adam", "adamw"):
            return Moments("exp_avg", "exp_avg_sq")
        return Moments("momentum_buffer" if self._momentum[group] else None, None)

    def rates(self) -> list[GroupRates]:
        """Return every group's present rates, after schedulers changed them.

        Raises BadInput where a group's rule or parameters changed."""
        if self._count() != self._parameters:
            raise BadInput("the optimizer got other parameters after run.prepare; add all of them before")
        rates = []
        for index, group in enumerate(self._optimizer.param_groups):
            if (
                _rule(self._optimizer, index, group) != self.rules[index]
                or bool(group.get("momentum")) != (self._momentum[index])
            ):
                raise BadInput(
                    f"group {index} of the optimizer turned momentum, nesterov or decoupled weight decay on or off "
                    "after run.prepare; change only rates while training"
                )
            decay = float(group["weight_decay"])
            if self.rules[index] in ("adam", "adamw"):
                beta1, beta2 = (float(beta) for beta in group["betas"])
                rates.append((float(group["lr"]), decay, beta1, beta2, float(group["eps"])))
            else:
                rates.append((float(group["lr"]), decay, float(group["momentum"]), 0.0, 0.0))
        return rates

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


_FAMILIES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def _rule(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]) -> Rule:
    for option in ("dampening", "amsgrad", "differentiable"):
        if group.get(option):
            raise BadInput(
                f"group {index} of the optimizer has {option}={group[option]!r}, of which strategy stale-sparse has no "
                f"sparse form. Leave {option} out, or use strategy dense"
            )
    if isinstance(optimizer, torch.optim.SGD):
        return "nesterov" if group["nesterov"] else "sgd"
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    return "adamw" if decoupled else "adam"


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for parameters that the exchange does not take, and for optimizers without a sparse form."""
    assert isinstance(settings, StaleSparse)
    if settings.exchange == "gradients":
        if len(script.optimizers) > 1:
            raise BadInput(
                'several optimizers with exchange = "gradients": what a pass gives to parameters of another one leaves '
                'before its zero_grad(). Use exchange = "updates", strategy dense, or one optimizer with several groups'
            )
        Rates(script.optimizers[0])
    layout.check_script(settings, script)


def lay_out_for_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, rates: Rates, *, lazy: bool
) -> list[Layer]:
    """Lay out every trained parameter of a checked model with fresh shared parameters, residuals and moments.

    lazy: with last_step."""
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    layers: list[Layer] = []
    for name, parameter in trained(model):
        group = groups[id(parameter)]
        moments = rates.moments(group)
        shared_param = shared_param_of(parameter)
        layers.append(
            Layer(
                name=name,
                parameter=parameter,
                order=len(layers),
                group=group,
                rule=rates.rules[group],
                shared_param=shared_param,
                residual=zeros(shared_param.numel()),
                first=zeros(shared_param.numel()) if moments.first is not None else None,
                second=zeros(shared_param.numel()) if moments.second is not None else None,
                last_step=(
                    torch.zeros(block_count(shared_param.numel()), dtype=torch.int32)
                    if lazy and moments.first is not None
                    else None
                ),
            )
        )
    return layers


def adopt_optimizer_state(layers: Sequence[Layer], optimizer: torch.optim.Optimizer, rates: Rates) -> int:
    """Begin with the optimizer's moments (of a checkpoint). Returns how many updates were made before.

    The optimizer's state becomes the layers' own memory, so that optimizer.state_dict() returns it."""
    made = 0
    for layer in layers:
        names = rates.moments(layer.group)
        state = optimizer.state[layer.parameter]
        for name, mine in ((names.first, layer.first), (names.second, layer.second)):
            if name is None or mine is None:
                continue
            saved = state.get(name)
            if isinstance(saved, torch.Tensor):
                layer.shaped(mine).copy_(saved)
            state[name] = layer.shaped(mine)
        if layer.rule in ("adam", "adamw"):
            made = max(made, int(state.get("step", 0)))
            state["step"] = torch.tensor(float(made))
    return made
