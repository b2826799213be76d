"""Hears of updates that a torch.amp.GradScaler left out: of gradients that overflowed it makes none, and tells nobody.
And of its factor on the losses.

Ranks that reduce their gradients overflow together. Where each has its own one does alone, and the others still wait
for its part of the update."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state


class ScaledSteps:
    """Wraps methods of the class GradScaler while it lives. There is no other way: a GradScaler that leaves an update
    out calls nothing of the optimizer, and the script's instance is known to nobody before its first call.

    `stepped` is set by the optimizers' post hook."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        left_out: Callable[[torch.optim.Optimizer], None],
        for_show: Callable[[], bool],
        partial: Callable[[], bool],
    ) -> None:
        """left_out: called at the end of a GradScaler.step(optimizer) with one of these that made no update. for_show:
        whether what the script does counts for nothing: then a GradScaler learns nothing from it. partial: whether the
        gradients of the pass wait for those of later ones, so that there is nothing to unscale yet."""
        self.stepped = False
        self.scaler: GradScaler | None = None  # that scaled a loss since its last update
        self._optimizers, self._left_out = optimizers, left_out
        self._for_show, self._partial = for_show, partial
        self._wrapped, self._wrapped_update = GradScaler.step, GradScaler.update
        self._wrapped_scale = GradScaler.scale

    def wrap(self) -> None:
        """Wrap the class from here on, until `close`. Call it once nothing can be refused any more."""

        @functools.wraps(self._wrapped_scale)
        def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            self.scaler = scaler
            return self._wrapped_scale(scaler, *args, **kwargs)

        @functools.wraps(self._wrapped)
        def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._partial():
                return optimizer.step(*args, **kwargs)
            self.stepped = False
            made = self._wrapped(scaler, optimizer, *args, **kwargs)
            if not self.stepped and any(optimizer is one for one in self._optimizers):
                self._left_out(optimizer)
            return made

        @functools.wraps(self._wrapped_update)
        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            self.scaler = None
            if self._partial():
                scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
                return
            before = scaler.state_dict() if self._for_show() else {}
            self._wrapped_update(scaler, *args, **kwargs)
            if before:
                scaler.load_state_dict(before)

        GradScaler.step = step  # type: ignore[assignment, method-assign]
        GradScaler.update = update  # type: ignore[assignment, method-assign]
        GradScaler.scale = scale  # type: ignore[assignment, method-assign]

    def loss_scale(self) -> float:
        """The factor on the losses whose gradients come now; 1 without a GradScaler."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def close(self) -> None:
        GradScaler.scale = self._wrapped_scale  # type: ignore[method-assign]
        GradScaler.step = self._wrapped  # type: ignore[method-assign]
        GradScaler.update = self._wrapped_update  # type: ignore[method-assign]
