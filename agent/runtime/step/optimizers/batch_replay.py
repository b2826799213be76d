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

from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.model_state import ModelTensors, load_module, module_state, put_into
from atoll.agent.runtime.model.snapshot import Tracked


class BatchReplay:
    """The state at the epoch's end, kept while the last batch is trained for show.

    In the CPU's memory, like a checkpoint's: a model that fills its GPU has no room for a second one there."""

    def __init__(self, model: nn.Module, optimizer: OptimizerState, tracked: Mapping[str, Tracked]) -> None:
        self._model, self._model_state = model, _kept(module_state(model))
        self._unsaved = _kept(ModelTensors.of(model).unsaved)
        objects: list[Any] = [optimizer, *tracked.values()]
        self._states = [(thing, _kept(thing.state_dict())) for thing in objects]

    def undo(self) -> None:
        """Put everything back as it was."""
        load_module(self._model, self._model_state)
        modules = ModelTensors.of(self._model).owners
        for name, buffer in self._unsaved.items():
            path, _, key = name.rpartition(".")
            put_into(modules[path]._buffers, key, buffer)
        for thing, state in self._states:
            thing.load_state_dict(state)


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        kept = copy.copy(value)  # a module's state dict has the versions of its layout as an attribute
        dict.update(kept, {key: _kept(item) for key, item in value.items()})  # a Counter's own would add
        return kept
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    return copy.deepcopy(value)
