"""Refuses at run.prepare layers whose sparse gradients nothing would send, or no optimizer would take."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atoll.errors import BadInput


def refuse_sparse_modules(model: nn.Module) -> None:
    """Raise BadInput for layers with sparse gradients, under a strategy that takes dense ones alone."""
    for name, _ in _sparse_layers(model):
        raise BadInput(
            f"{name} makes sparse gradients, which this strategy does not send; build it with "
            "sparse=False, or choose a strategy that does (docs/strategies.md)"
        )


def refuse_dense_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise BadInput for layers with sparse gradients whose optimizer takes dense ones alone."""
    groups = {id(one): (by, group) for by in optimizers for group in by.param_groups for one in group["params"]}
    for name, weight in _sparse_layers(model):
        optimizer, group = groups[id(weight)]
        if (why := _refusal(optimizer, group, weight)) is not None:
            raise BadInput(
                f"{name} makes sparse gradients, which its {type(optimizer).__name__} refuses: {why}. Give its weight "
                "to an optimizer of its own that takes them (SparseAdam; SGD or Adagrad, without weight_decay and "
                "fused), or build it with sparse=False"
            )


def _sparse_layers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and weight of each layer that trains by sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield name or "the model", module.weight


def _refusal(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: torch.Tensor) -> str | None:
    """Return why the optimizer raises for a sparse gradient with these settings, None if it does not.

    A copy steps on a parameter of its own. Another library's step() may do anything, and is not called."""
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return None
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=weight.dtype, device=weight.device))
    entry = torch.ones(1, 1, dtype=weight.dtype, device=weight.device)
    index = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    parameter.grad = torch.sparse_coo_tensor(index, entry, (1, 1), is_coalesced=True, check_invariants=False)
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = [{**group, "params": [parameter]}], defaultdict(dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sparse tensors that it makes
        try:
            trial.step()
        except RuntimeError as error:
            return str(error)
        except KeyError:
            return None  # before torch 2.13 Adagrad makes its state when it is built
    return None
