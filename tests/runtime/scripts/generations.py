"""Generations in memory as a test needs them: one every step, however busy the machine is."""

from __future__ import annotations

import time
from typing import Any

import atoll
from atoll.agent.runtime.checkpoints.memory.cost import cadence


def keep_every_step() -> None:
    """Whatever it costs."""
    cadence.MAX_COST_SHARE = 100.0  # type: ignore[misc]


def keep_no_more() -> None:
    """But one that is under way: the next is due after more steps than there are, whatever one was seen to cost."""
    never: Any = property(lambda _: cadence.MAX_STEPS_BETWEEN, lambda _, every: None)
    cadence.Cadence.every = never


def await_generation(run: atoll.Run) -> None:
    """That which is under way is whole on this rank; once it is on all, the next boundary begins another one. Not for
    ever: who should take the copy may be dead."""
    tier: Any = run._training.state.memory  # type: ignore[union-attr]
    ends_s = time.monotonic() + 10
    while tier.enabled and tier.progress().step < tier._current and time.monotonic() < ends_s:
        time.sleep(0.005)
