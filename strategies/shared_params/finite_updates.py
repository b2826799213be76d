"""Keep values that are not finite from removing a worker that exchanges updates.

Plain PyTorch trains with NaN for ever once a gradient has one. Here the shared parameters stay finite, because blocks
that are not finite are never sent. But a worker whose weights are NaN would contribute nothing any more. So an update
whose gradients are not finite is left out, as a GradScaler does. Weights may still become NaN or infinite, as after an
overflow within the update. They take the shared values again, and the optimizer's state of them is reset."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from atoll.agent.runtime.step.backward.gradient_passes import squared_norm, total
from atoll.errors import NotFinite

MOST_INCIDENTS: Final = 5
"""Updates with values that are not finite, among the newest WINDOW_UPDATES, that stop the worker and the job."""
WINDOW_UPDATES: Final = 100
_LARGEST: Final = torch.finfo(torch.float32).max


class Incidents:
    """Count the updates of one worker in which something was not finite."""

    def __init__(self, rank: int, report: Callable[[str], None]) -> None:
        """report: takes a line for the job's events."""
        self._rank, self._report = rank, report
        self._updates: deque[int] = deque(maxlen=MOST_INCIDENTS)

    def add(self, update: int, text: str) -> None:
        """Record an incident in `update`. Raises NotFinite where incidents recur."""
        self._report(text)
        if update not in self._updates:
            self._updates.append(update)
        if len(self._updates) == MOST_INCIDENTS and update - self._updates[0] < WINDOW_UPDATES:
            raise NotFinite(
                f"rank {self._rank}: values were not finite in {MOST_INCIDENTS} of the last {WINDOW_UPDATES} updates, "
                f"now in update {update}: {text}. Lower the learning rate, clip gradients with run.clip_grad_norm, or "
                "leave out the samples whose loss is not finite"
            )


class FiniteUpdates:
    """Leave out optimizer updates whose gradients are not finite.

    An optimizer skips parameters without a gradient, so they have none during its step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], left_out: Callable[[str], None]) -> None:
        """left_out: called with what was found before an update is left out; may raise."""
        self._left_out = left_out
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their gradients, during a step
        self._hooks = [hook for one in optimizers for hook in self._hooked(one)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hooked(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        if closure is not None or getattr(optimizer, "grad_scale", None) is not None:
            return  # gradients come within the step, or a GradScaler leaves it out by itself
        held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if _are_finite([one.grad for one in held]):
            return
        bad = [one for one in held if not _are_finite([one.grad])]
        self._aside = [(one, one.grad) for one in held]
        for one in held:
            one.grad = None
        self._left_out(
            f"its update was left out, for the gradients of {len(bad)} of {len(held)} parameters were not finite"
        )

    def _after(self, *_: object) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []


@torch.no_grad()
def reset_state_not_finite(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Reset the state of every parameter whose state has a value that is not finite. Returns how many those were.

    Its tensors become zeros and its count of steps 0, as in a fresh Adam, SGD or Adagrad."""
    states = [state for one in optimizers for state in one.state.values() if _has_bad_values(state)]
    for state in states:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() > 0 or name == "step"):
                value.zero_()
    return len(states)


def _has_bad_values(state: dict[str, Any]) -> bool:
    tensors = [one for one in state.values() if isinstance(one, torch.Tensor) and one.is_floating_point()]
    return not all(bool(one.isfinite().all()) for one in tensors)


@torch.no_grad()
def _are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return True if the gradients are finite, and their float32 sum of squares, which moments are made of."""
    return total([squared_norm(one) for one in gradients]) <= _LARGEST
