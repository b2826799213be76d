"""Layers for the exchange of gradients: moments and residuals beside shared parameters, as the sparse optimizers need
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.kernels.compress import block_count
from atoll.strategies.shared_params.layout import Layer, shared_param_of, trained, zeros
from atoll.strategies.stale_sparse.optimizer_rules import Rates


def lay_out_for_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, rates: Rates, *, lazy: bool
) -> list[Layer]:
    """Lay out every trained parameter with fresh shared parameters, residuals and moments. lazy: with last_step.

    Raises BadInput for parameters that cannot be flattened."""
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    layers: list[Layer] = []
    for name, parameter in trained(model):
        group = groups[id(parameter)]
        moments = rates.moments(group)
        shared_param = shared_param_of(name, parameter)
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
