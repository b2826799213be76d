"""How much memory the checkpoints of a job will take, before it has trained a step."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.memory.store import SLOTS

LAYOUT_BYTES: Final = 1 << 20
"""For what a file holds beside the state: names and shapes of a few thousand tensors."""


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of model and optimizer. An optimizer that has not stepped yet has no state: its own settings tell how many
    numbers it will keep for each parameter, and where they do not, two are assumed, as Adam has."""
    held = sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    trained = sum(_bytes(one) for group in optimizer.param_groups for one in group["params"])
    if any(optimizer.state.values()):
        values = (value for state in optimizer.state.values() for value in state.values())
        return held + sum(_bytes(value) for value in values if isinstance(value, torch.Tensor))
    defaults = optimizer.defaults
    moments = 2 + bool(defaults.get("amsgrad")) if "betas" in defaults or "momentum" not in defaults else 0
    if "betas" not in defaults and defaults.get("momentum"):
        moments = 1
    return held + moments * trained


def needed_bytes(total: int, shards: int, held: int) -> int:
    """What one rank's files take: its own shard and the `held` copies of others', each in all its slots."""
    return SLOTS * (1 + held) * (-(-total // shards) + LAYOUT_BYTES)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
