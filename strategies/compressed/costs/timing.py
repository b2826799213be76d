"""Time a pass: the backward time of each tensor, from the moments of its gradients, and the rest of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median_high
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from atoll.agent.runtime.step.measures.clock import Mark, MarkMaker
from atoll.strategies.compressed.costs.measured import KEPT

TIMED_EVERY_PASSES: Final = 5
"""Passes from one whose gradients are timed to the next."""


class PassTimes:
    """Times of every fifth pass. All methods run on the training thread."""

    def __init__(self, parameters: Sequence[nn.Parameter], make: MarkMaker) -> None:
        self._make = make
        self._came: list[Mark | None] = [None] * len(parameters)
        self._own: list[tuple[Mark, Mark]] = []  # the strategy's own work behind a gradient
        self._begin: Mark | None = None
        self._taken: deque[list[float]] = deque(maxlen=KEPT)  # of the newest timed passes, seconds by tensor
        self._begun_s = self._combined_s = 0.0
        self._rest: deque[float] = deque(maxlen=KEPT)
        self._iterations: deque[float] = deque(maxlen=KEPT)
        self._hooks: list[RemovableHandle] = [
            one.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
            for index, one in enumerate(parameters)
        ]

    def begin(self, *, looked_at: bool) -> None:
        now_s = time.monotonic()
        if self._begun_s and self._combined_s > self._begun_s:
            self._rest.append(now_s - self._combined_s)
            self._iterations.append(now_s - self._begun_s)
        self._begun_s = now_s
        self._read()
        self._begin = self._make() if looked_at else None
        self._came = [None] * len(self._came)
        self._own.clear()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Exclude the work inside from the backward pass."""
        if self._begin is None:
            yield
            return
        begun = self._make()
        yield
        self._own.append((begun, self._make()))

    def combined(self) -> None:
        """Record that everything the pass waited for has arrived."""
        self._combined_s = time.monotonic()

    def forget(self) -> None:
        """Forget iteration times: the exchange changes now, or the next step is unusual."""
        self._iterations.clear()
        self._begun_s = 0.0

    @property
    def backward_s(self) -> list[float] | None:
        """Return medians by tensor; None before a pass was timed."""
        return [median_high(one) for one in zip(*self._taken, strict=True)] if self._taken else None

    @property
    def rest_s(self) -> float:
        """Return the seconds of a step without backward pass and waiting."""
        return median_high(self._rest or [0.0])

    @property
    def iteration_s(self) -> float:
        """Return the seconds from pass to pass; 0 if unknown."""
        return median_high(self._iterations or [0.0])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, index: int, _: torch.Tensor) -> None:
        if self._begin is not None:
            self._came[index] = self._make()

    def _read(self) -> None:
        """Read the times of the previous pass. A gradient out of order counts at its own moment; a missing one took no
        time."""
        if self._begin is None:
            return
        moments = sorted((mark.since(self._begin), index) for index, mark in enumerate(self._came) if mark is not None)
        if not moments:
            return
        own = sorted((begun.since(self._begin), ended.since(self._begin)) for begun, ended in self._own)
        found, before_s = [0.0] * len(self._came), 0.0
        for at_s, index in moments:
            taken_s = sum(min(end_s, at_s) - begin_s for begin_s, end_s in own if before_s <= begin_s < at_s)
            found[index] = max(at_s - before_s - taken_s, 0.0)
            before_s = at_s
        self._taken.append(found)
