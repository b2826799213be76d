"""Refuses parameters that begin to train after run.prepare: ranks combine and compare those that it was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from atoll.errors import BadInput


@contextmanager
def unfrozen(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters require gradients as at run.prepare. A layer may be frozen since, where a joiner's is not yet."""
    frozen = [one for one in trained if not one.requires_grad]
    for one in frozen:
        one.requires_grad_(True)
    try:
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


class PreparedParameters:
    """The parameters that run.prepare was given, compared with those of each later pass."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        named = list(model.named_parameters())
        self._frozen = [(name, one) for name, one in named if not one.requires_grad]
        self._known = {id(one): one for _, one in named}
        self._optimizers = optimizers
        self._counts = self._count()

    def check(self) -> None:
        """Raise BadInput for a parameter that was frozen then, or that an optimizer was given since."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise BadInput(
                    f"parameter {name} was frozen at run.prepare and requires a gradient now, which would not be "
                    "combined with the other ranks'. Let it require one at run.prepare, in an optimizer; freeze it "
                    "after that (requires_grad_(False)), and unfreeze it in the step that shall train it"
                )
        if (counts := self._count()) == self._counts:
            return
        for optimizer in self._optimizers:
            foreign = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in self._known]
            if foreign:
                shapes = ", ".join(str(list(one.shape)) for one in foreign[:3])
                raise BadInput(
                    f"the {type(optimizer).__name__} got {len(foreign)} parameters since run.prepare ({shapes}), whose "
                    "gradients would not be combined with the other ranks'. Have them in the model and the optimizer "
                    "at run.prepare; freeze them after that (requires_grad_(False)) until they shall train"
                )
        self._counts = counts

    def _count(self) -> list[int]:
        return [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in self._optimizers]
