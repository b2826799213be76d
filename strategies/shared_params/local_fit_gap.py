"""Measures how much better its own weights are for a rank's own data than the shared model: the logarithm of what the
loss of its batch would be at the shared parameters, over what it is.

The rank's weights are ahead of the shared parameters by a, and its gradient there is g. To first order the loss at the
shared parameters is less by g a, and its logarithm by g a / loss:

    advantage = -(g . a) / loss

The logarithm, for where weights fit their data the loss falls about exponentially with what they move. Nothing is
trained otherwise for it: another forward pass, or one at the shared parameters, would be."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Final

import torch

from atoll.strategies.shared_params.exchange import LayerExchange

NEEDED: Final = 8
"""Batches: one says little."""
EVERY: Final = 8
"""Updates, at the least."""
MOST: Final = 100.0
"""No more is told: of a loss of next to nothing it means nothing."""
SHARE: Final = 0.005
"""Of the time, that may be spent on it."""


class NewestAdvantages:
    """Of the newest batches. Pure."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NEEDED)

    def add(self, gained: float, loss: float) -> None:
        """gained: of the loss, to first order, by what the weights are ahead. No number and no loss are left out."""
        if loss > 0 and math.isfinite(gained / loss):
            self._newest.append(min(max(0.0, gained / loss), MOST))

    @property
    def value(self) -> float:
        """Their median; 0 before there are enough, and where the shared model is better."""
        return statistics.median(self._newest) if len(self._newest) == NEEDED else 0.0


class LocalFitGap:
    """Used on the training thread alone."""

    def __init__(self, exchange: LayerExchange) -> None:
        self._exchange = exchange
        self._loss: torch.Tensor | None = None  # of the update's passes so far
        self._unknown = False  # of one of them it is not known
        self._newest = NewestAdvantages()
        self._next_s = 0.0

    @property
    def value(self) -> float:
        return self._newest.value

    def passes(self, loss: torch.Tensor | None, *, first: bool) -> None:
        """A backward pass of this loss, [], begins. first: of an update. None: it is not known."""
        self._unknown = loss is None or (self._unknown and not first)
        if loss is not None:
            self._loss = loss if first or self._loss is None else self._loss + loss

    def is_due(self, update: int) -> bool:
        return update % EVERY == 0 and not self._unknown and time.monotonic() >= self._next_s

    @torch.no_grad()
    def measure(self, factor: float) -> None:
        """After the update's last pass. factor: that its gradients were multiplied by."""
        begun_s = time.monotonic()
        loss = float(self._loss) * factor if self._loss is not None else 0.0
        self._newest.add(-self._along_the_way_ahead(), loss)
        now_s = time.monotonic()
        self._next_s = now_s + (now_s - begun_s) / SHARE

    def _along_the_way_ahead(self) -> float:
        """The scalar product of the gradient and of what the weights are ahead of the shared parameters."""
        product = 0.0
        for tensor in self._exchange.tensors:
            shared_param = self._exchange.read_shared_param(tensor)
            for layer, part in tensor.parts(shared_param):
                gradient = layer.parameter.grad
                if gradient is not None:
                    ahead = layer.parameter.float() - layer.shaped(part).to(gradient.device)
                    product += float((ahead * gradient).sum())
        return product
