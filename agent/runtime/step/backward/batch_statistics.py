"""The layers that compute with the other samples of a rank's local batch, and so need several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from atoll.agent.runtime.model.module_hooks import ModuleHook
from atoll.errors import BadInput


def batch_statistics_layers(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers that will train, without SyncBatchNorm, whose batch is that of all ranks.

    One that is in eval mode counts as frozen, unless the whole model is: then the script has yet to call train()."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        if layer.training or not model.training
    ]


def name_drop_last(layers: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Make these layers explain where a single value per channel comes from, when they refuse it."""
    return [layer.register_forward_pre_hook(ModuleHook(_refuse_one_value)) for layer in layers]


def _refuse_one_value(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """A batch of one sample in all, which may come at an epoch's end, leaves no rank two; one image has many values."""
    if layer.training and inputs and inputs[0].dim() > 1 and inputs[0].numel() == inputs[0].shape[1]:
        raise BadInput(
            f"{type(layer).__name__} needs more than one value per channel and got one: the batch has a single sample "
            "in all, as an epoch's last one may. Use drop_last=True or another batch_size"
        )
