"""Optimizers of the conformance matrix. Only torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

STEEP: Final = 1e-4
"""eps of Adam's family: at torch's 1e-8 the sign of rounding errors would move weights whose gradient is zero."""

Optimizers = list[torch.optim.Optimizer]
Changes = Callable[[Sequence[torch.optim.Optimizer], nn.Module, int], None]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def _one(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Module], Optimizers]:
    return lambda model: [kind(_trained(model), **settings)]


def _muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices = [one for one in _trained(model) if one.dim() == 2]
    rest = [one for one in _trained(model) if one.dim() != 2]
    others: Optimizers = [torch.optim.AdamW(rest, lr=0.01, eps=STEEP)] if rest else []
    return [torch.optim.Muon(matrices, lr=0.02), *others]


def _per_group(model: nn.Module) -> Optimizers:
    matrices = {"params": [one for one in _trained(model) if one.dim() > 1], "lr": 0.02, "betas": (0.8, 0.95)}
    rest = {"params": [one for one in _trained(model) if one.dim() <= 1], "weight_decay": 0.0}
    return [torch.optim.AdamW([one for one in (matrices, rest) if one["params"]], lr=0.01, eps=STEEP)]


def _held_back(model: nn.Module) -> Optimizers:
    """The last parameter that trains is frozen until a later step, as in gradual unfreezing."""
    _trained(model)[-1].requires_grad_(False)
    return [torch.optim.SGD(_trained(model), lr=0.05, momentum=0.9)]


def _nothing(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, step: int) -> None:
    pass


def _change(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, step: int) -> None:
    if step == 2:
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1


def _add_group(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, step: int) -> None:
    owned = {id(one) for group in optimizers[0].param_groups for one in group["params"]}
    if step == 2 and len(optimizers[0].param_groups) == 1:
        last = [one for one in model.parameters() if id(one) not in owned][-1]
        optimizers[0].add_param_group({"params": [last.requires_grad_()], "lr": 0.02})


@dataclass(frozen=True, slots=True)
class Recipe:
    make: Callable[[nn.Module], Optimizers]
    linear: bool = False
    """Updates are linear in gradients, so that a sum of the ranks' updates is the update of the sum."""
    before_step: Changes = _nothing
    schedule: str = ""
    """When a scheduler steps: "" never, "step" or "epoch"."""
    closure: bool = False
    takes_sparse: bool = False
    several: bool = False
    moments: bool = True
    """Whether a parameter moves, or decays, in a step without a gradient."""
    sparse_form: bool = True
    """Whether it is of the families that `exchange = "gradients"` applies to parts of a gradient."""

    averaged: bool = True
    """Whether `groups` averages what it keeps."""

    @property
    def needs_loop(self) -> bool:
        """Whether it is made of what a script does in its own loop."""
        return self.before_step is not _nothing or self.closure or self.several or bool(self.schedule)


RECIPES: Final[Mapping[str, Recipe]] = {
    "sgd": Recipe(_one(torch.optim.SGD, lr=0.05), linear=True, moments=False, takes_sparse=True),
    "sgd-momentum": Recipe(_one(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01), linear=True),
    "sgd-nesterov": Recipe(_one(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True), linear=True),
    "sgd-fused": Recipe(_one(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True), linear=True),
    "adam": Recipe(_one(torch.optim.Adam, lr=0.01, eps=STEEP, foreach=True)),
    "adam-amsgrad": Recipe(_one(torch.optim.Adam, lr=0.01, eps=STEEP, amsgrad=True), sparse_form=False, averaged=False),
    "adamw": Recipe(_one(torch.optim.AdamW, lr=0.01, eps=STEEP, foreach=False)),
    "adamw-fused": Recipe(_one(torch.optim.AdamW, lr=0.01, eps=STEEP, fused=True)),
    "adamw-capturable": Recipe(_one(torch.optim.AdamW, lr=0.01, eps=STEEP, capturable=True)),
    "adagrad": Recipe(
        _one(torch.optim.Adagrad, lr=0.05, eps=STEEP), takes_sparse=True, sparse_form=False, averaged=False
    ),
    "sparse-adam": Recipe(
        lambda model: [
            torch.optim.SparseAdam([model.get_parameter("words.weight")], lr=0.01, eps=STEEP),
            torch.optim.SGD([one for name, one in model.named_parameters() if name != "words.weight"], lr=0.05),
        ],
        takes_sparse=True,
        several=True,
        sparse_form=False,
    ),
    "rmsprop": Recipe(_one(torch.optim.RMSprop, lr=0.005, eps=STEEP), sparse_form=False, averaged=False),
    "adafactor": Recipe(_one(torch.optim.Adafactor, lr=0.02), sparse_form=False, averaged=False),
    "muon-adamw": Recipe(_muon_and_adamw, several=True, sparse_form=False),
    "lbfgs": Recipe(_one(torch.optim.LBFGS, lr=0.1)),
    "closure": Recipe(_one(torch.optim.SGD, lr=0.05), linear=True, moments=False, closure=True),
    "per-group": Recipe(_per_group),
    "changed-mid-run": Recipe(_one(torch.optim.SGD, lr=0.05, momentum=0.9), linear=True, before_step=_change),
    "schedule-by-step": Recipe(_one(torch.optim.SGD, lr=0.05, momentum=0.9), linear=True, schedule="step"),
    "schedule-by-epoch": Recipe(_one(torch.optim.AdamW, lr=0.01, eps=STEEP), schedule="epoch"),
    "group-added": Recipe(_held_back, linear=True, before_step=_add_group),
}
