"""Weights of passes whose losses are means over counts of the rank's own: tokens, pixels, pairs.

By default a rank's loss counts by samples, b_i / B. A mean over n_i tokens counts n_i / N, where N is the sum over all
ranks, and over all passes whose gradients are exchanged together."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.errors import BadInput


class CountedPasses:
    def __init__(self, model: nn.Module, unit: int, total: Callable[[float], float]) -> None:
        """unit: a count that is equal on all ranks; gradients of local passes are divided by it until their exchange.
        total: collective; the sum of a number over all ranks."""
        self._model, self._unit, self._total = model, float(unit), total
        self._local: bool | None = None  # whether local passes gave counts; None: there are none
        self._counted = 0.0  # in those

    def weight(self, count: float | None, batch: BatchSlice, *, local: bool, after_exchange: bool) -> float | None:
        """Return the weight of this rank's gradients in a pass; None: by samples. Collective where it is not local.

        count: None: of samples. local: its gradients stay in p.grad until those of a later pass leave. after_exchange:
        p.grad has gradients of a pass that was exchanged. Raises BadInput, PeerLost."""
        if self._local not in {None, count is not None}:
            raise BadInput(
                "run.backward with weight= in some passes of an accumulation under run.no_sync(), and without in "
                "others. Give it in all of them, or in none"
            )
        self._local = (count is not None) if local else None
        if count is None:
            return None
        if not (math.isfinite(count) and count >= 0):
            raise BadInput(f"run.backward got weight = {count}; it must be a number of 0 or more")
        own = count if batch.weight > 0 else 0.0  # samples of an empty slice count nowhere
        if local and after_exchange:
            raise BadInput(
                "run.backward with weight= under run.no_sync(), after a pass of the same update that was exchanged. "
                "Put all passes of an update but the last under run.no_sync()"
            )
        if local:
            self._counted += own
            return own / self._unit
        counted, self._counted = self._counted, 0.0
        whole = self._total(counted + own)
        if counted:
            self._scale_earlier(self._unit / whole)
        return own / whole if whole else 0.0

    def forget(self) -> None:
        """Local passes count for nothing: the run goes on from a state before them."""
        self._local, self._counted = None, 0.0

    @torch.no_grad()
    def _scale_earlier(self, factor: float) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
