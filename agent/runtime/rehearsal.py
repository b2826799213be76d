"""Going on exactly at an epoch's end: its last batch is shown once more, and what that changes is undone.

What follows the loop over the loader (validation, run.report(loss=loss.item())) runs again after such a resume, and
scripts use there what the loop left behind, such as `loss`. With an empty loop they would fail for a missing name, in
every run anew."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.loader import Position
from atoll.agent.runtime.snapshot import Tracked


class Rehearsal:
    """The state at the epoch's end, kept while the last batch is trained for show."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, tracked: Mapping[str, Tracked]) -> None:
        self._objects: dict[str, Any] = {"model": model, "optimizer": optimizer, **tracked}
        self._states = {name: copy.deepcopy(thing.state_dict()) for name, thing in self._objects.items()}

    def undo(self) -> None:
        """Put everything back as it was."""
        for name, thing in self._objects.items():
            thing.load_state_dict(self._states[name])


def last_batch(position: Position, global_batch: int) -> Position:
    """Where the batch began that ended the epoch. position: the epoch's end, with at least one sample consumed."""
    start = (position.consumed - 1) // global_batch * global_batch
    return Position(position.epoch, start, position.step - 1)
