"""Measure how much better a rank's own weights fit its own data than the shared parameters do.

The measure is the logarithm of a ratio: the loss of the rank's batch at the shared parameters, over its loss now. The
rank's weights are ahead of the shared parameters by a, and its gradient there is g. To first order the loss at the
shared parameters is less by g a, and its logarithm by g a / loss:

    advantage = -(g . a) / loss

It is a logarithm because the loss falls about exponentially with the way that weights move where they fit their data.
The measurement does not change training: another forward pass, or one at the shared parameters, would."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Final

import torch

from atoll.strategies.shared_params.exchange import LayerExchange

NEEDED: Final = 8
"""Batches in a median: a single one is too noisy."""
EVERY: Final = 8
"""Updates between two measurements, at least."""
MOST: Final = 100.0
"""Largest advantage that is reported: with a loss near 0 the ratio is meaningless."""
SHARE: Final = 0.005
"""Largest share of the time that measurements may take."""


class NewestAdvantages:
    """Advantages of the newest batches. Pure."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NEEDED)

    def add(self, gained: float, loss: float) -> None:
        """Add a batch. Values that are not finite and losses that are not positive are left out.

        gained: how much less the loss is, to first order, because the weights are ahead."""
        if loss > 0 and math.isfinite(gained / loss):
            self._newest.append(min(max(0.0, gained / loss), MOST))

    @property
    def value(self) -> float:
        """Return their median: 0 before there are enough, and where the shared model is better."""
        return statistics.median(self._newest) if len(self._newest) == NEEDED else 0.0


class LocalFitGap:
    """Measurement of the advantage. Used on the training thread alone."""

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
        """Record that a backward pass begins. loss: [], or None if it is not known. first: the update's first pass."""
        self._unknown = loss is None or (self._unknown and not first)
        if loss is not None:
            self._loss = loss if first or self._loss is None else self._loss + loss

    def is_due(self, update: int) -> bool:
        return update % EVERY == 0 and not self._unknown and time.monotonic() >= self._next_s

    @torch.no_grad()
    def measure(self, factor: float) -> None:
        """Measure after the update's last pass. factor: what its gradients were multiplied by."""
        begun_s = time.monotonic()
        loss = float(self._loss) * factor if self._loss is not None else 0.0
        self._newest.add(-self._along_the_way_ahead(), loss)
        now_s = time.monotonic()
        self._next_s = now_s + (now_s - begun_s) / SHARE

    def _along_the_way_ahead(self) -> float:
        """Return the scalar product of the gradient and the weights' difference from the shared parameters."""
        product = 0.0
        for tensor in self._exchange.tensors:
            shared_param = self._exchange.read_shared_param(tensor)
            for layer, part in tensor.parts(shared_param):
                gradient = layer.parameter.grad
                if gradient is not None:
                    ahead = layer.parameter.float() - layer.shaped(part).to(gradient.device)
                    product += float((ahead * gradient).sum())
        return product
