"""Tells families of optimizers apart by how their learning rate follows the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.telemetry.telemetry_limits import ADAPTIVE, SGD


def family_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return SGD where each update is a linear function of the gradients, else ADAPTIVE.

    Adam, Adagrad, RMSprop, Lion, Muon and others divide by the gradient's size in one way or another. Whatever is
    derived from an SGD, or called one, is linear."""
    linear = all(any("SGD" in one.__name__ for one in type(optimizer).__mro__) for optimizer in optimizers)
    return SGD if linear else ADAPTIVE
