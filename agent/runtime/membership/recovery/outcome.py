"""Outcome of a recovery policy on one member."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """The position at which all members continue, and the state that is not in model and optimizers yet."""

    position: Position
    generation: Recovered | None = None
    """A generation from memory that becomes the state of every member."""
    origin: Origin | None = None
    """State beside model and optimizers."""
