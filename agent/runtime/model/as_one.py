"""Several optimizers of one run, seen as one where their state is kept: checkpoints, rehearsals, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from atoll.agent.runtime.model.memory_order import restore_strides
from atoll.errors import CheckpointError


class OptimizerState(Protocol):
    """The state of an optimizer, or of several."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Any, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class SeveralOptimizers:
    """An OptimizerState in the form that torch gives one optimizer with all their groups: parameters are numbered on
    from one optimizer to the next, one that two of them have has two numbers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The very dicts of the optimizers."""
        return [group for one in self._optimizers for group in one.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the state, keyed by the optimizer's place and the parameter."""
        return {(place, key): value for place, one in enumerate(self._optimizers) for key, value in one.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Raises CheckpointError for an optimizer that keeps something under no parameter of its own."""
        together: dict[str, Any] = {"state": {}, "param_groups": []}
        for place, (one, first) in enumerate(zip(self._optimizers, self._firsts(), strict=True)):
            own = one.state_dict()
            if set(own) != set(together) or not all(isinstance(key, int) for key in own["state"]):
                raise CheckpointError(
                    f"optimizer {place} is a {type(one).__name__}, which keeps state beside that of its parameters. "
                    "Give run.prepare this one alone, or one of torch's in its place"
                )
            together["state"] |= {first + key: value for key, value in own["state"].items()}
            together["param_groups"] += [_numbered_from(group, first) for group in own["param_groups"]]
        return together

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Raises ValueError where it is that of other optimizers."""
        groups, at = state_dict["param_groups"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} parameter groups, the optimizers have {len(self.param_groups)}")
        for one, first in zip(self._optimizers, self._firsts(), strict=True):
            until, last = at + len(one.param_groups), first + _count(one)
            own = {key - first: value for key, value in state_dict["state"].items() if first <= key < last}
            one.load_state_dict(
                {"state": own, "param_groups": [_numbered_from(group, -first) for group in groups[at:until]]}
            )
            at = until

    def _firsts(self) -> list[int]:
        """The number of each optimizer's first parameter."""
        return list(accumulate(map(_count, self._optimizers[:-1]), initial=0))


def as_one(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerState:
    """The only one itself, or all of them."""
    return optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)


def load_state(optimizer: OptimizerState, state_dict: dict[str, Any]) -> None:
    """Load a state dict of a checkpoint, which keeps tensors in logical order: each gets its parameter's strides."""
    optimizer.load_state_dict(state_dict)
    if isinstance(optimizer, torch.optim.Optimizer):
        _keep_float32(optimizer, state_dict)
    for key, kept in optimizer.state.items():
        parameter = key[1] if isinstance(key, tuple) else key  # of several optimizers
        if isinstance(parameter, torch.Tensor):
            restore_strides(parameter, kept)


def _keep_float32(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take float32 state of 16-bit parameters as it was saved: torch rounds it to the parameter's dtype.

    Sparse rules keep such state. A worker that joins must have the same bits as the others."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        kept = optimizer.state.get(parameter, {})
        for name, saved in state_dict["state"].get(number, {}).items():
            loaded = kept.get(name)
            if not (isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor)):
                continue
            if saved.dtype == torch.float32 != loaded.dtype:
                kept[name] = saved.to(loaded.device)


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _numbered_from(group: Mapping[str, Any], first: int) -> dict[str, Any]:
    return {**group, "params": [first + number for number in group["params"]]}
