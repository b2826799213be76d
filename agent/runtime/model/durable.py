"""State of a strategy beside model and optimizer, as checkpoints and view changes carry it.

State is shared (equal on all ranks) or own (of one rank). Which form it has depends on the moment:

| state | exists | belongs to | a lost rank takes along |
|---|---|---|---|
| `Durable.shared` | always | all ranks | nothing |
| `Durable.own_at_boundary` | at a boundary, where only steps change it | one rank | all since the copy in memory |
| `RollingState` | always, where a background thread changes it | ranks' parts by round | all since the copy in memory |
| `Handover`, flushed | from a boundary left by all, until the next view begins | all its ranks | nothing |
| `Handover`, not flushed | as above, over thin links | one rank | its unsent updates and sums |
| `SurvivorState` | from a loss, until the next view begins | one survivor | its unsent updates and sums |
| `Origin` | from a restore or a recovery, until the strategy has started | one rank | nothing more than the above |

A run restored from disk finds own state in files beside the checkpoint; `Origin.own` is None then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.model.model_state import plain_parameters

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, torch.Tensor]

UNSENT_MOMENTUM: Final = "velocity."
"""Prefix of a layer's name where an entry beside residuals is momentum of gradients that were not sent."""
AGGREGATOR_SUM: Final = "aggregator sum: "
"""Prefix of a layer's name where an entry beside residuals is the sum that the layer's aggregator keeps."""


@dataclass(frozen=True, slots=True)
class OwnState:
    """State of one rank alone. rank: its number in the run or view before."""

    rank: int
    residual: Tensors  # not sent yet, by layer; float32 [N]
    optimizer: Mapping[str, Any] | None  # state_dict, where each rank has its own and the checkpoint lacks it
    aggregator_sums: Tensors = field(default_factory=dict)  # of layers that the rank owned; float32 [N]


@dataclass(frozen=True, slots=True)
class Origin:
    """State from which a strategy starts in a run or view: of a checkpoint, or of the view before."""

    run: int  # the run that wrote it
    view: int  # the view of that run
    step: int
    world_size: int  # of that view
    shared: Tensors  # from `Durable.shared`; empty where a strategy shares nothing
    own: Sequence[OwnState] | None = None  # what this rank takes over; None: it is in files beside the checkpoint


@dataclass(frozen=True, slots=True)
class Handover:
    """State beside model and optimizer with which a rank leaves a view, at a boundary at which all ranks leave.

    The ranks add up what they have not sent, so each has all of it (`unsent`). Over thin links they do not: then
    `origin.own` is the rank's own state. own_moments: as `RollingState` has it."""

    origin: Origin
    unsent: Tensors  # of all ranks together, by layer; float32 [N]
    own_moments: bool = False

    def for_rank(self, rank: int, takers: int) -> Origin:
        """Return the origin with own state for this rank of the next view: its own, or one of `takers` equal parts."""
        if self.origin.own is not None:
            return replace(self.origin, own=[replace(own, rank=rank) for own in self.origin.own])
        part = {name: one / takers for name, one in self.unsent.items()}
        return replace(self.origin, own=[OwnState(rank, part, None)])


class SurvivorState(Protocol):
    """Own state of a rank whose view ended by a loss."""

    def relative_to(self, shared: Tensors) -> OwnState:
        """Return it relative to the shared parameters of the member whose `Durable.shared` this is.

        Collective, of the members of the next view. May be called again if that view is not formed. Raises PeerLost."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a shared tensor, by name. into: where to copy them, uint8 [end - begin]."""

    name: str
    begin: int
    end: int
    into: Bytes


class RollingState(Protocol):
    """State that a background thread changes while the script trains. Checkpoints in memory capture it as of the sync
    round that is newest at a boundary, the same on every rank. They do not wait for that round at the boundary.

    Call `capture` on the training thread, then `read` and `wait` on one other thread, once for each `capture`."""

    @property
    def own_moments(self) -> bool:
        """True if the optimizer's moments are this rank's own."""

    @property
    def beside_moments(self) -> int:
        """The most bytes that training adds to the optimizer's own state."""

    def shared(self) -> Tensors:
        """Return what all ranks have alike after the same sync round: flat CPU tensors, always in the same memory."""

    def parameters(self) -> Collection[int]:
        """Return id(parameter) of the parameters that have a shared parameter."""

    def residuals(self) -> Mapping[str, int]:
        """Return the entries of each layer's residual, and of each sum that this rank keeps (by AGGREGATOR_SUM +
        layer)."""

    def capture(self, parts: Sequence[Part], residuals: Mapping[str, Floats]) -> None:
        """Begin to capture `parts` and this rank's residuals as of now. Call at a boundary."""

    def read(self) -> None:
        """Read what the next optimizer.step() changes. Returns before that step."""

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Wait for the sync round. False if it cannot come any more. Raises DeadlineExceeded."""


class Durable(Protocol):
    """Access to a strategy's state beside model and optimizer. Call it on the training thread, but for `freeze` and
    `shared_params`.

    The next view takes the state over when `LocalUpdate.start` gets its `Origin`. What a strategy that inherits from
    this leaves out says that there is nothing of the kind."""

    survives_update: bool = False
    """True if the state is whole at any moment after `freeze`, also between optimizer.step() and the boundary."""

    def freeze(self) -> None:
        """Stop changing the state, because it will be read and training has ended. May be called by any thread."""
        return

    def shared_params(self) -> Mapping[int, torch.Tensor]:
        """Return the true values by id(parameter), where the model's parameters lag behind them; of equal shapes."""
        return {}

    def shared(self) -> Tensors:
        """Return the state beside model and optimizer that is equal on all ranks."""
        return {}

    def own_writer(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        """Return a function that writes this rank's own state beside the checkpoint `header`; None if there is none.

        copy: the function runs while the script trains. It raises CheckpointError."""
        return None

    def own_at_boundary(self) -> Tensors:
        """Return this rank's own state that only steps change, by layer; float32 [N]. Read it before the next step."""
        return {}

    def own_after_flush(self) -> Tensors:
        """Return what a flush at a boundary left unsent, by layer; float32 [N]. All ranks have the same layers."""
        return {}

    def without_flush(self) -> tuple[Tensors, OwnState]:
        """Return the shared state, with "shared_param.LAYER" of all weights, and a copy of this rank's own.

        Call at a boundary, once every update is in the shared parameters."""
        return {}, OwnState(0, {}, None)

    def survivor_state(self) -> SurvivorState | None:
        """Return this rank's own state, after a loss and `freeze`. None if it needs this rank's own shared
        parameters."""
        return None

    def rolling(self) -> RollingState | None:
        """Return the state that a background thread changes; None if only steps change the state."""
        return None


class NothingBeside(Durable):
    """The Durable of a strategy without state beside model and optimizer."""


class BetweenViews(NothingBeside):
    """The Durable of a worker that has left one view and has not begun the next one."""

    def __init__(self, origin: Origin, model: nn.Module, survivor: SurvivorState | None) -> None:
        """survivor: of the view before, if a loss ended it. It is used again if the next view is not formed."""
        self._origin, self._model, self._survivor = origin, model, survivor

    def shared_params(self) -> Mapping[int, torch.Tensor]:
        shared = self._origin.shared
        named = ((one, shared.get(f"shared_param.{name}")) for name, one in plain_parameters(self._model))
        return {
            id(one): shared_param.as_strided(one.shape, one.stride())
            for one, shared_param in named
            if shared_param is not None
        }

    def shared(self) -> Tensors:
        return self._origin.shared

    def survivor_state(self) -> SurvivorState | None:
        return self._survivor
