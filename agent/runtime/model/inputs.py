"""Checks what users hand to run.prepare, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from atoll.agent.runtime.data.loader import LoaderSettings
from atoll.agent.runtime.data.orders import Order
from atoll.agent.runtime.model.model_part import ModelPart
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput

WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel)
NAMES_SHOWN: Final = 3


class SeveralModels(nn.ModuleList):
    """Models that the script gave separately. A backward pass may reach some of them alone."""


def one_module(given: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model that was given, or one with all of them: "0.", "1." and so on stand before the names of its parameters.

    Raises BadInput for what strategy `dense` cannot train."""
    models: list[nn.Module] = _listed(given)
    for model in models:
        check_model(model)
    if not any(parameter.requires_grad for model in models for parameter in model.parameters()):
        raise BadInput("no parameter of the model requires a gradient; there is nothing to train")
    if len(models) == 1:
        return models[0]
    together = SeveralModels(models)
    together.training = any(model.training for model in models)
    return together


def check_model(model: nn.Module) -> None:
    """Raises BadInput for what strategy `dense` cannot train."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the model, or a tuple of models"
        )
    if isinstance(model, WRAPPERS):
        raise BadInput(f"model is wrapped in {type(model).__name__}; pass the bare model, Atoll combines the gradients")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise BadInput(f"parameter {name} has no shape yet; run one batch through the model before run.prepare")
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise BadInput(f"parameter {name} is {parameter.dtype}; only real floating-point parameters can be trained")


def listed_optimizers(
    model: nn.Module, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """All that move the model's parameters. Raises BadInput for optimizers whose update would differ between ranks or
    cannot be split into steps, and where one is missing."""
    optimizers: list[torch.optim.Optimizer] = _listed(given)
    if len({id(one) for one in optimizers}) < max(len(optimizers), 1):
        raise BadInput("run.prepare got no optimizer, or the same one twice; pass each once")
    for optimizer in optimizers:
        check_optimizer(model, optimizer)
    check_owned(model, optimizers)
    return optimizers


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises BadInput where this one cannot be used with the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. Several models or optimizers go "
            "as tuples: run.prepare((generator, discriminator), (optimizer_g, optimizer_d), dataset, batch_size=...)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput("LBFGS evaluates the loss several times in one step; use an optimizer that takes one gradient")
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = sum(id(parameter) not in known for parameter in group["params"])
        if foreign:
            raise BadInput(
                f"{foreign} parameters of group {index} of the {type(optimizer).__name__} are not the model's, so "
                "their gradients would not be combined. Give run.prepare all models that train, as a tuple"
            )


def check_owned(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises BadInput where a parameter is trained that no optimizer has: who else moves it is nobody's to combine,
    compare or save."""
    owned = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    foreign = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in owned]
    if foreign:
        names = ", ".join(foreign[:NAMES_SHOWN]) + (", ..." if len(foreign) > NAMES_SHOWN else "")
        raise BadInput(
            f"{len(foreign)} parameters require a gradient and are no optimizer's: {names}. Give run.prepare all "
            "optimizers, as a tuple. Freeze what shall never train before this call, and what shall train later after "
            "it, with requires_grad_(False)"
        )


Likeness = Mapping[str, int]
"""What all ranks prepare alike, in digests below 2^63, by what it is of."""


def likeness(
    session: Session, model: nn.Module, settings: LoaderSettings, order: Order, part: ModelPart | None = None
) -> Likeness:
    """part: what of the whole model this rank has; None: all of it."""
    state = model.state_dict().items()
    tensors = [(name, tuple(one.shape), one.dtype) for name, one in state if isinstance(one, torch.Tensor)]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "model": _digest((tensors, trained) if part is None else (part.whole.digest, part.trained)),
        "memory format (the strides of the model's parameters)": _digest(_strides(model) if part is None else ()),
        "cut of the model into stages": _digest(part.cuts if part is not None else ()),
        "length of the dataset": order.samples or 0,
        "the sampler's order, or the stream's first sample (all workers read the same whole stream)": order.digest(),
        "batch_size": settings.batch_size,
        "shuffle": int(settings.shuffle),
        "drop_last": int(settings.drop_last),
        "whether BatchNorm layers train": settings.min_local_batch,
        "seed": session.seed % 2**63,
        "checkpoint_every": session.checkpoint.every_steps,
        "checkpoint_directory": int(session.checkpoint.directory is not None),
    }


def _strides(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return the strides of parameters that are not contiguous: gradients are summed in memory order."""
    return [(name, one.stride()) for name, one in model.named_parameters() if not one.is_contiguous()]


def check_alike(session: Session, mine: Likeness) -> None:
    """Collective. Raises BadInput on every rank if they were given different things, naming what differs; PeerLost."""
    assert session.group is not None
    mine = {**mine, "the run's first plan": _digest(session.first)}
    rows = session.group.gather_rows(list(mine.values()))
    for column, what in enumerate(mine):
        differing = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
        if differing:
            raise BadInput(f"{what} on rank {differing[0]} differs from rank 0's; every rank must run the same script")


def _digest(value: object) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "little")
