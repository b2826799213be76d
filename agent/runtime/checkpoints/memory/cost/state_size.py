"""Estimates the memory that the checkpoints of a job will take, before it has trained a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.shard_folders import SLOTS
from atoll.agent.runtime.model.snapshot import Snapshot

LAYOUT_BYTES: Final = 1 << 20
"""For what a file holds beside the state: names and shapes of a few thousand tensors."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """shared: what all ranks have alike, of which each keeps a part; own: what each has for itself."""

    shared: int
    own: int

    def of_shard(self, shards: int) -> int:
        return -(-self.shared // shards) + self.own + LAYOUT_BYTES

    def of_slots(self, shards: int) -> int:
        """Return the bytes of the files of one shard, wherever they lie."""
        return SLOTS * self.of_shard(shards)


def size_of_state(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], snapshot: Snapshot) -> StateBytes:
    """Estimate the bytes of model, optimizers and what is kept beside them. A snapshot was taken."""
    rolling = snapshot.durable.rolling()
    moments = sum(map(moment_bytes, optimizers))
    if rolling is None:
        own = sum(map(_bytes, snapshot.durable.own_at_boundary().values()))
        return StateBytes(sum(map(_bytes, (*model.parameters(), *model.buffers()))) + moments, own)
    shared = sum(map(_bytes, (*rolling.shared().values(), *snapshot.frozen().values())))
    residuals = torch.float32.itemsize * sum(rolling.residuals().values())
    kept = moments + rolling.beside_moments if rolling.own_moments and moments else 0
    return StateBytes(shared, residuals + snapshot.own_bytes + kept)


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Estimate the bytes of an optimizer's state. One that has not stepped has none yet: its settings tell how many
    numbers it will keep for each parameter. Where they do not, two are assumed, as for Adam."""
    trained = sum(_bytes(one) for group in optimizer.param_groups for one in group["params"])
    if any(optimizer.state.values()):
        values = (value for state in optimizer.state.values() for value in state.values())
        return sum(_bytes(value) for value in values if isinstance(value, torch.Tensor))
    defaults = optimizer.defaults
    moments = 2 + bool(defaults.get("amsgrad")) if "betas" in defaults or "momentum" not in defaults else 0
    if "betas" not in defaults and defaults.get("momentum"):
        moments = 1
    return moments * trained


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
