"""Weights as they were, for a micro-batch whose forward pass came before an update and whose backward pass comes after.

Source: weight stashing, Narayanan et al., PipeDream, 2019, section 3.3: both passes with the same weights, so that what
comes out is a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightStash:
    """A copy of what trains in a stage. For a while the parameters have it in place of their own memory; who holds that
    beside them, as averages do, does not notice."""

    def __init__(self, stage: nn.Module) -> None:
        self._kept = [(one, one.detach().clone()) for one in stage.parameters() if one.requires_grad]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass with these weights. What it saves of them for the backward pass is this copy, whose updates
        autograd would otherwise believe to see: they share the parameter's version."""
        with self.in_place(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
            yield

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The stage has these weights. For a backward pass: it may compute activations again."""
        now = [one.data for one, _ in self._kept]
        for one, kept in self._kept:
            one.data = kept
        try:
            yield
        finally:
            for (one, _), data in zip(self._kept, now, strict=True):
                one.data = data


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
