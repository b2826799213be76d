"""The state of a strategy for checkpoints: what all ranks share, what is each rank's own, how both are taken over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.model_state import plain_parameters

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

OWNER_SUM: Final = "owner sum: "
"""Stands before a layer's name where what is told beside residuals is the sum that its owner keeps."""


@dataclass(frozen=True, slots=True)
class OwnState:
    """What was one rank's alone, of `rank` of the run before."""

    rank: int
    residual: Mapping[str, torch.Tensor]  # what it had not sent yet, by layer, float32 [N]
    optimizer: Mapping[str, Any] | None  # state_dict, where each rank had its own and it is not in the checkpoint
    owner_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of layers that it owned, float32 [N]


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint from which a run goes on; or what the ranks of the view before handed over."""

    run: int  # that wrote it
    view: int  # of that run
    step: int
    world_size: int  # of that run
    shared: Mapping[str, torch.Tensor]  # what `Durable.shared` gave; empty for a strategy that gives nothing
    own: Sequence[OwnState] | None = None  # that this rank takes over; None: it is beside the checkpoint, on disks


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What the ranks of a view had beside model and optimizer when all left it, the same on each of them. So whoever of
    them comes into the next view has all of it; but for `own`, which is this rank's alone where nobody handed over.
    own_moments: as RollingState has it."""

    origin: Origin  # without own
    unsent: Mapping[str, torch.Tensor]  # by all of them together, by layer; float32 [N]
    own: OwnState | None = None
    own_moments: bool = False

    def shared_out(self, rank: int, takers: int) -> Origin:
        """With its own, or with one of `takers` equal parts of what was not sent, for this rank."""
        if self.own is not None:
            return replace(self.origin, own=[replace(self.own, rank=rank)])
        part = {name: one / takers for name, one in self.unsent.items()}
        return replace(self.origin, own=[OwnState(rank, part, None)])


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank goes on with in another view where nobody hands over. shared: as `Durable.shared`, and "master.LAYER"
    of weights that are not the masters."""

    shared: Mapping[str, torch.Tensor]
    own: OwnState


Survived = Callable[[Mapping[str, torch.Tensor]], OwnState]
"""Collective, of the members of the next view: what a rank has for itself after a loss, as of the masters of the one
whose `Durable.shared` it is given. It may be asked again, where that view does not come about. Raises PeerLost."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a shared tensor, by name, and the memory that they go to, uint8 [end - begin]."""

    name: str
    begin: int
    end: int
    into: Bytes


class RollingState(Protocol):
    """What goes on changing in the background while training does. Checkpoints in memory capture it as of the sync
    round that is the newest at a boundary, on every rank the same, without waiting for it there.

    `capture` on the training thread; `read` and then `wait` on one other, once for each `capture`."""

    @property
    def own_moments(self) -> bool:
        """Whether the optimizer's moments are this rank's own."""

    @property
    def beside_moments(self) -> int:
        """Bytes at most that come to the optimizer's own state in training."""

    def shared(self) -> Mapping[str, torch.Tensor]:
        """What is equal on all ranks after the same sync round: flat, on the CPU, always the same memory."""

    def parameters(self) -> Collection[int]:
        """id(parameter) of those that have a master."""

    def residuals(self) -> Mapping[str, int]:
        """Entries, by layer, of what this rank has not sent; and by OWNER_SUM and layer of the sums it keeps."""

    def capture(self, parts: Sequence[Part], residuals: Mapping[str, Floats]) -> None:
        """At a boundary: from now on `parts`, and this rank's residuals, are captured as of this moment."""

    def read(self) -> None:
        """Done before the next optimizer.step(): read what that changes."""

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Until the sync round is there. False if that is not to be expected any more. Raises DeadlineExceeded."""


class Durable(Protocol):
    """What a checkpoint needs of a strategy beside model and optimizer. Called on the training thread but for `freeze`
    and `masters`.

    Another membership takes it over as `LocalUpdate.start` is given its `Origin`."""

    survives_update: bool
    """Whether the state is whole at any moment after `freeze`, also between optimizer.step() and the boundary."""

    def freeze(self) -> None:
        """Somebody is going to read the state, and training will not go on. By any thread."""

    def masters(self) -> Mapping[int, torch.Tensor]:
        """The parameters' true values by id(parameter), where the model's own are behind; shaped alike."""

    def shared(self) -> Mapping[str, torch.Tensor]:
        """State beside the model's and the optimizer's that is equal on all ranks."""

    def own_writer(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        """What writes to disk what is this rank's alone and belongs to the checkpoint `header`; None: nothing is.

        copy: it is called while training goes on. It raises CheckpointError."""

    def standing(self) -> Mapping[str, torch.Tensor]:
        """At a boundary: what is this rank's alone and nothing in the background changes, by layer; float32 [N]. Read
        before training goes on."""

    def unsent(self) -> Mapping[str, torch.Tensor]:
        """At a boundary, after a flush: what this rank has for itself still and others may take over, by layer; float32
        [N]. By all the same layers."""

    def kept(self) -> Kept:
        """At a boundary, every update in the masters, without a flush: all of it, this rank's own in copies."""

    def survived(self) -> Survived | None:
        """After a loss and `freeze`: None where this rank's own is of no use with another one's masters."""

    def rolling(self) -> RollingState | None:
        """What the background changes; None: the state stands still between a boundary and the next update."""


class NothingBeside:
    """The Durable of who keeps nothing beside model and optimizer, and changes nothing in the background."""

    survives_update = False

    def freeze(self) -> None: ...

    def masters(self) -> Mapping[int, torch.Tensor]:
        return {}

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {}

    def own_writer(self, header: Header, *, copy: bool) -> None: ...

    def standing(self) -> Mapping[str, torch.Tensor]:
        return {}

    def unsent(self) -> Mapping[str, torch.Tensor]:
        return {}

    def kept(self) -> Kept:
        return Kept({}, OwnState(0, {}, None))

    def survived(self) -> Survived | None: ...

    def rolling(self) -> None: ...


class BetweenViews(NothingBeside):
    """The Durable of a worker that has left one view and is not in the next yet, with what it goes on with."""

    def __init__(self, origin: Origin, model: nn.Module, survived: Survived | None) -> None:
        """survived: as the view before had it, where a loss ended that; for a loss before the next is there."""
        self._origin, self._model, self._survived = origin, model, survived

    def masters(self) -> Mapping[int, torch.Tensor]:
        shared = self._origin.shared
        named = ((one, shared.get(f"master.{name}")) for name, one in plain_parameters(self._model))
        return {id(one): master.as_strided(one.shape, one.stride()) for one, master in named if master is not None}

    def shared(self) -> Mapping[str, torch.Tensor]:
        return self._origin.shared

    def survived(self) -> Survived | None:
        return self._survived
